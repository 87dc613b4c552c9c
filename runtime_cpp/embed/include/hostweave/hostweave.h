/* Common C API of exported programs. Each program adds its own functions in programs/NAME/c_api.h.
 *
 * A call returns HW_OK or an error code; hw_last_error() returns the text. Use a world and its programs from one thread at a
 * time, with the device of the world current. */
#ifndef HOSTWEAVE_H
#define HOSTWEAVE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hw_status {
  HW_OK = 0,
  HW_ARGUMENT_ERROR = 1,  /* an argument is NULL, or an array does not fit the program; nothing was enqueued */
  HW_EXECUTION_ERROR = 2, /* such as a failed CUDA call, or sizes for which the program is not prepared */
  HW_OTHER_ERROR = 3      /* such as out of host memory */
} hw_status;

/* Error text of this thread's last call, or "" if the call succeeded. Valid until the thread's next call. */
const char* hw_last_error(void);

/* Values of cudaDataType_t. */
typedef enum hw_dtype {
  HW_F32 = 0,
  HW_F64 = 1,
  HW_F16 = 2,
  HW_I8 = 3,
  HW_U8 = 8, /* also bool */
  HW_I32 = 10,
  HW_U32 = 12,
  HW_BF16 = 14,
  HW_I16 = 20,
  HW_U16 = 22,
  HW_I64 = 24,
  HW_U64 = 26,
  HW_F8_E4M3 = 28,
  HW_F8_E5M2 = 29
} hw_dtype;

#define HW_MAX_DIMS 8

typedef struct hw_shape {
  int ndim;
  int64_t dims[HW_MAX_DIMS];
} hw_shape;

/* A contiguous array on a device, owned by the caller. Functions that prepare a program do not access `data`. */
typedef struct hw_tensor {
  void* data; /* NULL only if the array has no elements */
  hw_dtype dtype;
  hw_shape shape; /* local shape */
  int device;
  hw_shape global_shape; /* global shape; ndim 0 if all ranks have blocks of equal shape */
} hw_tensor;

/* Id of a world. One rank makes the id and sends it to all ranks. */
typedef struct hw_id {
  char bytes[128];
} hw_id;

/* One rank of a world. */
typedef struct hw_world hw_world;

/* Declares that ranks are threads of this process, with one device each. The CUDA target fails if this host has fewer than
 * `count` GPUs. The CPU target creates its devices. Call this function once, before all other calls. */
hw_status hw_use_devices(int count);
/* Declares that ranks are processes. Every process calls this function once, before all other calls. */
hw_status hw_use_processes(void);
hw_status hw_new_id(hw_id* id);
/* Collective: joins the world. Makes the device current. */
hw_status hw_world_create(const hw_id* id, int device, int rank, int size, hw_world** world);
/* Destroys the world. Destroy its programs first. */
hw_status hw_world_destroy(hw_world* world);

#ifdef __cplusplus
}
#endif
#endif
