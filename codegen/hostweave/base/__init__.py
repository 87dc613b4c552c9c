from time import clock_gettime_ns

# CLOCK_REALTIME_COARSE. File systems take timestamps from this clock. So a file that is written later never has an earlier timestamp.
_CLOCK_OF_FILES = 5

imported_at = clock_gettime_ns(_CLOCK_OF_FILES)  # If a file of the package was edited later, this process may run its old version.
