from time import clock_gettime_ns

# CLOCK_REALTIME_COARSE, from which file systems take timestamps. A file that is written later never has an earlier timestamp.
_CLOCK_OF_FILES = 5

imported_at = clock_gettime_ns(_CLOCK_OF_FILES)  # this process may run the old version of a file that was edited later
