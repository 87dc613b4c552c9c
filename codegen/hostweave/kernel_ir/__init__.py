"""Passes that lower a kernel to loops."""
