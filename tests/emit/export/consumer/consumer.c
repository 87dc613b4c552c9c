/* Runs the server's two programs through their C API. Usage: consumer RANK RANKS ID_FILE. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "programs/hidden/c_api.h"
#include "programs/project/c_api.h"

/* Functions of CUDA's C API, declared here because the headers of the CPU target are C++. */
int cudaMalloc(void** pointer, size_t size);
int cudaMemcpy(void* to, const void* from, size_t size, int kind);
int cudaDeviceSynchronize(void);

#define ROWS 2
#define WIDTH 4
#define HIDDEN 6

static void expect_status(hw_status status, hw_status expected, const char* call) {
  if (status == expected) return;
  fprintf(stderr, "%s: status %d: %s\n", call, status, hw_last_error());
  exit(1);
}
#define CHECK(call) expect_status(call, HW_OK, #call)

static void expect(hw_status status, hw_status expected, const char* words) {
  expect_status(status, expected, words);
  if (strstr(hw_last_error(), words)) return;
  fprintf(stderr, "%s: not in: %s\n", words, hw_last_error());
  exit(1);
}

/* An array whose elements are all `value`. */
static hw_tensor array(hw_dtype dtype, int64_t rows, int64_t columns, float value) {
  hw_tensor result = {0};
  const size_t count = (size_t)(rows * columns);
  float* values = malloc(count * sizeof(float));
  size_t i;
  for (i = 0; i < count; ++i) values[i] = value;
  result.dtype = dtype;
  result.shape.ndim = 2;
  result.shape.dims[0] = rows;
  result.shape.dims[1] = columns;
  cudaMalloc(&result.data, count * sizeof(float));
  cudaMemcpy(result.data, values, count * sizeof(float), 1);
  free(values);
  return result;
}

int main(int argc, char** argv) {
  hw_id id;
  hw_world* world;
  hidden_program* hidden;
  project_program* project;
  hidden_inputs hidden_in;
  hidden_outputs hidden_out;
  hidden_output_shapes hidden_shapes;
  project_inputs project_in;
  project_outputs project_out;
  project_output_shapes project_shapes;
  float y[ROWS * WIDTH];
  void* x;
  const int rank = argc == 4 ? atoi(argv[1]) : 0, ranks = argc == 4 ? atoi(argv[2]) : 1;
  FILE* file = NULL;

  CHECK(hw_use_processes());
  if (rank == 0) {
    char path[4096];
    snprintf(path, sizeof path, "%s.new", argv[3]);
    CHECK(hw_new_id(&id));
    file = fopen(path, "wb");
    fwrite(&id, sizeof id, 1, file);
    fclose(file);
    rename(path, argv[3]);
  } else {
    while (!file) file = fopen(argv[3], "rb");
    if (fread(&id, sizeof id, 1, file) != 1) return 1;
  }
  CHECK(hw_world_create(&id, 0, rank, ranks, &world));
  CHECK(hidden_create(world, &hidden));
  CHECK(project_create(world, &project));

  hidden_in.x = array(HW_F32, ROWS, WIDTH, 1);
  hidden_in.up = array(HW_F32, WIDTH, HIDDEN / 2, 2);
  CHECK(hidden_prepare(hidden, &hidden_in, &hidden_shapes));
  hidden_out.y = array(HW_F32, hidden_shapes.y.dims[0], hidden_shapes.y.dims[1], 0);
  project_in.h = hidden_out.y;
  project_in.down = array(HW_F32, HIDDEN / 2, WIDTH, (float)(rank + 1));
  CHECK(project_prepare(project, &project_in, &project_shapes));
  project_out.y = array(HW_F32, project_shapes.y.dims[0], project_shapes.y.dims[1], 0);

  CHECK(hidden_run(hidden, &hidden_in, &hidden_out, NULL));
  CHECK(project_run(project, &project_in, &project_out, NULL));
  cudaDeviceSynchronize();
  cudaMemcpy(y, project_out.y.data, sizeof y, 2);
  printf("%.3f\n", y[ROWS * WIDTH - 1]); /* 8 * 3 * (1 + 2) */

  hidden_in.x.shape.dims[0] = ROWS + 1;
  expect(hidden_run(hidden, &hidden_in, &hidden_out, NULL), HW_EXECUTION_ERROR, "not prepared for these sizes");
  hidden_in.x.shape.dims[0] = -ROWS;
  expect(hidden_prepare(hidden, &hidden_in, &hidden_shapes), HW_ARGUMENT_ERROR, "got f32[-2, 4]");
  hidden_in.x.shape.dims[0] = ROWS;
  hidden_in.up.shape.dims[0] = WIDTH - 1; /* contradicts the shape of x */
  expect(hidden_run(hidden, &hidden_in, &hidden_out, NULL), HW_ARGUMENT_ERROR, "up");
  hidden_in.up.shape.dims[0] = WIDTH;
  hidden_in.x.dtype = HW_BF16;
  expect(hidden_run(hidden, &hidden_in, &hidden_out, NULL), HW_ARGUMENT_ERROR, "x");
  hidden_in.x.dtype = HW_F32;
  hidden_in.x.shape.ndim = 9;
  expect(hidden_prepare(hidden, &hidden_in, &hidden_shapes), HW_ARGUMENT_ERROR, "9 dims");

  hidden_in.x.shape.ndim = 2;

  x = hidden_in.x.data;
  hidden_in.x.data = NULL;
  expect(hidden_prepare(hidden, &hidden_in, &hidden_shapes), HW_ARGUMENT_ERROR,
         "x: the data pointer is null, but f32[2, 4] has elements");
  expect(hidden_run(hidden, &hidden_in, &hidden_out, NULL), HW_ARGUMENT_ERROR, "pass the address of memory on device 0");
  hidden_in.x.shape.dims[0] = 0; /* no elements */
  CHECK(hidden_prepare(hidden, &hidden_in, &hidden_shapes));
  hidden_out.y.data = NULL;
  hidden_out.y.shape.dims[0] = 0;
  CHECK(hidden_run(hidden, &hidden_in, &hidden_out, NULL));
  hidden_in.x.data = x;
  hidden_in.x.shape.dims[0] = hidden_out.y.shape.dims[0] = ROWS;
  CHECK(hidden_prepare(hidden, &hidden_in, &hidden_shapes));
  expect(hidden_run(hidden, &hidden_in, &hidden_out, NULL), HW_ARGUMENT_ERROR, "y: the data pointer is null");
  expect(hidden_run(hidden, NULL, &hidden_out, NULL), HW_ARGUMENT_ERROR,
         "in: the pointer is null; pass the address of an object");
  expect(hidden_run(hidden, &hidden_in, NULL, NULL), HW_ARGUMENT_ERROR, "out: ");
  expect(hidden_run(NULL, &hidden_in, &hidden_out, NULL), HW_ARGUMENT_ERROR, "program: ");
  expect(hidden_create(NULL, &hidden), HW_ARGUMENT_ERROR, "world: ");
  expect(hw_new_id(NULL), HW_ARGUMENT_ERROR, "id: ");

  CHECK(hidden_destroy(hidden));
  CHECK(project_destroy(project));
  CHECK(hw_world_destroy(world));
  return 0;
}
