from time import clock_gettime_ns

# CLOCK_REALTIME_COARSE. File systems use its ticks for timestamps, so it is never later than the timestamp of a file written next.
_CLOCK_OF_FILES = 5

imported_at = clock_gettime_ns(_CLOCK_OF_FILES)  # If a file of the package was edited later, this process may run its old version.
