from time import clock_gettime_ns

# CLOCK_REALTIME_COARSE, from which file systems take timestamps. So files that are written later have no timestamp before `imported_at`.
CLOCK_OF_FILES = 5

imported_at = clock_gettime_ns(CLOCK_OF_FILES)
