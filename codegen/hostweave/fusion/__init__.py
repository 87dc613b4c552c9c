"""The fusion IR: a program as math on global tensors."""
