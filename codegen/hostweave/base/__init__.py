from time import clock_gettime_ns

_CLOCK_OF_FILES = 5  # CLOCK_REALTIME_COARSE, whose ticks file systems note: never later than what a file that is written next gets

imported_at = clock_gettime_ns(_CLOCK_OF_FILES)  # a file of the package that was edited later may run here as it was before
