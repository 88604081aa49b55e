/* A list of kernel launches, run with one call from Python.

   `run` copies the parameters to its stack and writes the addresses of this call's tensors there. The kernels are nodes
   of a CUDA graph: giving the nodes their parameters and launching the graph takes the host a third of the time of
   separate launches. Threads may run one list at the same time, because `run` holds Python's lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <alloca.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

static CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 CUstream, void **, void **);
static CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);
static CUresult (*graph_create)(CUgraph *, unsigned);
static CUresult (*graph_add)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_KERNEL_NODE_PARAMS *);
static CUresult (*graph_instantiate)(CUgraphExec *, CUgraph, unsigned long long);
static CUresult (*graph_set)(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *);
static CUresult (*graph_launch)(CUgraphExec, CUstream);
static CUresult (*graph_destroy)(CUgraph);
static CUresult (*executable_destroy)(CUgraphExec);
static CUresult (*encode_map)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*replace_address)(CUtensorMap *, void *);
static CUresult (*parameter_info)(CUfunction, size_t, size_t *, size_t *); /* NULL before CUDA 12.4 */
static CUresult (*error_name)(CUresult, const char **);
static PyObject *data_ptr; /* the name of the method `Tensor.data_ptr` */

#define REQUIRED 0x80000000u

typedef struct {
  CUDA_KERNEL_NODE_PARAMS launch; /* without kernelParams, which each run sets */
  unsigned first;                 /* index of its first parameter in the list's parameters */
} Kernel;

typedef struct {
  uint32_t at, index; /* the pointer or descriptor at this byte of `values` gets addresses[index] + offset */
  uint64_t offset;
} Patch;

typedef struct {
  Py_ssize_t size, num_parameters, num_pointers, num_maps, num_kernels, num_bases;
  unsigned char *values; /* bytes of all parameters */
  uint32_t *parameters;  /* offset of each parameter in `values` */
  uint32_t *bases;       /* indices of tensors in the list `memory` of `run`; REQUIRED marks a non-empty tensor */
  Patch *pointers, *maps;
  Kernel *kernels;
  CUgraph graph;
  CUgraphNode *nodes; /* one per kernel, in a chain */
} List;

/* Executable graphs, each with 0.1 MB of GPU memory. A list has one executable graph per stream. Launches of one
   executable graph on two streams would wait for each other. A new executable graph replaces the oldest. */
#define MOST_EXECUTABLES 256
static struct {
  const List *list;
  CUstream stream;
  CUgraphExec graph;
} executables[MOST_EXECUTABLES];
static size_t oldest;

static PyObject *fail(const char *what, CUresult result) {
  const char *name = "unknown error";
  if (error_name) error_name(result, &name);
  return PyErr_Format(PyExc_RuntimeError, "%s failed: %s (%d)", what, name, (int)result);
}

/* use_driver(path): load the functions of the CUDA driver */
static PyObject *use_driver(PyObject *self, PyObject *path) {
  const char *name = PyUnicode_AsUTF8(path);
  void *driver = name ? dlopen(name, RTLD_LAZY) : NULL;
  if (!driver) return PyErr_Format(PyExc_OSError, "cannot load the CUDA driver: %s", dlerror());
  struct {
    void *function;
    const char *name;
  } needed[] = {
      {&launch_kernel, "cuLaunchKernel"},
      {&is_capturing, "cuStreamIsCapturing"},
      {&graph_create, "cuGraphCreate"},
      {&graph_add, "cuGraphAddKernelNode_v2"},
      {&graph_instantiate, "cuGraphInstantiateWithFlags"},
      {&graph_set, "cuGraphExecKernelNodeSetParams_v2"},
      {&graph_launch, "cuGraphLaunch"},
      {&graph_destroy, "cuGraphDestroy"},
      {&executable_destroy, "cuGraphExecDestroy"},
      {&encode_map, "cuTensorMapEncodeTiled"},
      {&replace_address, "cuTensorMapReplaceAddress"},
  };
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
    void *found = dlsym(driver, needed[i].name);
    if (!found) return PyErr_Format(PyExc_OSError, "the CUDA driver lacks %s of CUDA 12", needed[i].name);
    memcpy(needed[i].function, &found, sizeof found);
  }
  parameter_info = dlsym(driver, "cuFuncGetParamInfo");
  error_name = dlsym(driver, "cuGetErrorName");
  Py_RETURN_NONE;
}

/* parameter_sizes(function): bytes of each parameter of a kernel, or None if the driver cannot report sizes */
static PyObject *parameter_sizes(PyObject *self, PyObject *function) {
  unsigned long long handle = PyLong_AsUnsignedLongLong(function);
  if (PyErr_Occurred()) return NULL;
  if (!parameter_info) Py_RETURN_NONE;
  PyObject *sizes = PyList_New(0);
  size_t offset, size;
  for (size_t i = 0; sizes && parameter_info((CUfunction)handle, i, &offset, &size) == CUDA_SUCCESS; i++) {
    PyObject *value = PyLong_FromSize_t(size);
    if (!value || PyList_Append(sizes, value)) Py_CLEAR(sizes);
    Py_XDECREF(value);
  }
  return sizes;
}

/* encode(kind, address, sizes, strides, box, swizzle, fill): the bytes of a TMA descriptor. The innermost axis comes
   first. Strides are in bytes and omit the innermost axis. sizes and strides hold uint64, and box holds uint32. */
static PyObject *encode(PyObject *self, PyObject *args) {
  int kind, swizzle, fill;
  unsigned long long address;
  Py_buffer sizes, strides, box;
  CUtensorMap map;
  cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  if (!PyArg_ParseTuple(args, "iKy*y*y*ii", &kind, &address, &sizes, &strides, &box, &swizzle, &fill)) return NULL;
  CUresult result = encode_map(&map, kind, sizes.len / 8, (void *)address, sizes.buf, strides.buf, box.buf, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, fill);
  PyBuffer_Release(&sizes), PyBuffer_Release(&strides), PyBuffer_Release(&box);
  return result ? fail("encoding a TMA descriptor", result) : PyBytes_FromStringAndSize((char *)&map, sizeof map);
}

/* Free an executable graph. If the graph is running, the driver keeps it until the run ends. */
static void drop_executable(size_t index) {
  if (executables[index].list) executable_destroy(executables[index].graph);
  executables[index].list = NULL;
}

static void free_list(PyObject *capsule) {
  List *list = PyCapsule_GetPointer(capsule, NULL);
  for (size_t i = 0; i < MOST_EXECUTABLES; i++)
    if (executables[i].list == list) drop_executable(i);
  if (list->graph) graph_destroy(list->graph);
  PyMem_Free(list->values), PyMem_Free(list->parameters), PyMem_Free(list->bases);
  PyMem_Free(list->pointers), PyMem_Free(list->maps), PyMem_Free(list->kernels);
  PyMem_Free(list->nodes), PyMem_Free(list);
}

static void *copy_of(Py_buffer *buffer, Py_ssize_t item, Py_ssize_t *count) {
  void *copy = PyMem_Malloc(buffer->len + 1);
  *count = buffer->len / item;
  if (copy) memcpy(copy, buffer->buf, buffer->len);
  PyBuffer_Release(buffer);
  return copy;
}

static void set_kernel(Kernel *kernel, const uint64_t *numbers) {
  CUDA_KERNEL_NODE_PARAMS *launch = &kernel->launch;
  launch->func = (CUfunction)numbers[0];
  launch->gridDimX = numbers[1], launch->gridDimY = numbers[2], launch->gridDimZ = numbers[3];
  launch->blockDimX = 32 * numbers[4], launch->blockDimY = launch->blockDimZ = 1;
  launch->sharedMemBytes = numbers[5], kernel->first = numbers[6];
}

/* make_list(values, parameters, bases, pointers, maps, kernels): all arguments are bytes. parameters and bases hold
   uint32, pointers and maps hold Patch, and kernels holds seven uint64 per kernel: function, grid (3), warps, bytes of
   shared memory, index of the first parameter. */
static PyObject *make_list(PyObject *self, PyObject *args) {
  Py_buffer values, parameters, bases, pointers, maps, kernels;
  if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*", &values, &parameters, &bases, &pointers, &maps, &kernels)) return NULL;
  List *list = PyMem_Calloc(1, sizeof *list);
  if (!list) return PyErr_NoMemory();
  PyObject *capsule = PyCapsule_New(list, NULL, free_list);
  list->values = copy_of(&values, 1, &list->size);
  list->parameters = copy_of(&parameters, sizeof *list->parameters, &list->num_parameters);
  list->bases = copy_of(&bases, sizeof *list->bases, &list->num_bases);
  list->pointers = copy_of(&pointers, sizeof *list->pointers, &list->num_pointers);
  list->maps = copy_of(&maps, sizeof *list->maps, &list->num_maps);
  list->num_kernels = kernels.len / 56;
  list->kernels = PyMem_Calloc(list->num_kernels + 1, sizeof *list->kernels);
  list->nodes = PyMem_Calloc(list->num_kernels + 1, sizeof *list->nodes);
  if (list->values && list->parameters && list->bases && list->pointers && list->maps && list->kernels && list->nodes) {
    for (Py_ssize_t i = 0; i < list->num_kernels; i++)
      set_kernel(&list->kernels[i], (const uint64_t *)kernels.buf + 7 * i);
  } else {
    Py_CLEAR(capsule);
    PyErr_NoMemory();
  }
  PyBuffer_Release(&kernels);
  return capsule;
}

/* Write the addresses of the tensors that the list uses to `addresses`. */
static int read_addresses(const List *list, PyObject *memory, uint64_t *addresses) {
  for (Py_ssize_t i = 0; i < list->num_bases; i++) {
    PyObject *tensor = PyList_GetItem(memory, list->bases[i] & ~REQUIRED);
    PyObject *address = tensor ? PyObject_CallMethodNoArgs(tensor, data_ptr) : NULL;
    if (!address) return -1;
    addresses[i] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return -1;
    if (!addresses[i] && list->bases[i] & REQUIRED) {
      PyErr_SetString(PyExc_RuntimeError, "an operand of a recorded kernel has no memory, its storage was freed");
      return -1;
    }
  }
  return 0;
}

static CUDA_KERNEL_NODE_PARAMS with_parameters(const Kernel *kernel, void **parameters) {
  CUDA_KERNEL_NODE_PARAMS launch = kernel->launch;
  launch.kernelParams = parameters + kernel->first;
  return launch;
}

static CUresult launch_each(const List *list, void **parameters, CUstream stream) {
  CUresult result = CUDA_SUCCESS;
  for (Py_ssize_t i = 0; i < list->num_kernels && !result; i++) {
    CUDA_KERNEL_NODE_PARAMS launch = with_parameters(&list->kernels[i], parameters);
    result = launch_kernel(launch.func, launch.gridDimX, launch.gridDimY, launch.gridDimZ, launch.blockDimX, 1, 1,
                           launch.sharedMemBytes, stream, launch.kernelParams, NULL);
  }
  return result;
}

/* Make the CUDA graph of the list. Its nodes, one per kernel, keep copies of the parameters. */
static CUresult make_graph(List *list, void **parameters) {
  CUresult result = graph_create(&list->graph, 0);
  for (Py_ssize_t i = 0; i < list->num_kernels && !result; i++) {
    CUDA_KERNEL_NODE_PARAMS launch = with_parameters(&list->kernels[i], parameters);
    result = graph_add(&list->nodes[i], list->graph, i ? &list->nodes[i - 1] : NULL, i > 0, &launch);
  }
  if (result && list->graph) graph_destroy(list->graph), list->graph = NULL;
  return result;
}

static CUresult find_executable(List *list, CUstream stream, void **parameters, CUgraphExec *found) {
  for (size_t i = 0; i < MOST_EXECUTABLES; i++)
    if (executables[i].list == list && executables[i].stream == stream)
      return *found = executables[i].graph, CUDA_SUCCESS;
  CUresult result = list->graph ? CUDA_SUCCESS : make_graph(list, parameters);
  if (!result) result = graph_instantiate(found, list->graph, 0);
  if (result) return result;
  drop_executable(oldest);
  executables[oldest].list = list, executables[oldest].stream = stream, executables[oldest].graph = *found;
  oldest = (oldest + 1) % MOST_EXECUTABLES;
  return CUDA_SUCCESS;
}

static CUresult launch_as_graph(List *list, void **parameters, CUstream stream) {
  CUgraphExec graph;
  CUresult result = find_executable(list, stream, parameters, &graph);
  for (Py_ssize_t i = 0; i < list->num_kernels && !result; i++) {
    CUDA_KERNEL_NODE_PARAMS launch = with_parameters(&list->kernels[i], parameters);
    result = graph_set(graph, list->nodes[i], &launch);
  }
  return result ? result : graph_launch(graph, stream);
}

/* run(list, memory, stream): launch every kernel on the addresses of the tensors in the list `memory` */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  List *list = num_args == 3 ? PyCapsule_GetPointer(args[0], NULL) : NULL;
  if (!list) return PyErr_Format(PyExc_TypeError, "run takes a list of launches, a list of tensors and a stream");
  unsigned long long stream = PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  uint64_t *addresses = alloca((list->num_bases + 1) * sizeof *addresses);
  if (read_addresses(list, args[1], addresses)) return NULL;
  unsigned char *space = alloca(list->size + 128);
  unsigned char *values = (unsigned char *)(((uintptr_t)space + 127) & ~(uintptr_t)127);
  void **parameters = alloca((list->num_parameters + 1) * sizeof(void *));
  memcpy(values, list->values, list->size);
  for (Py_ssize_t i = 0; i < list->num_pointers; i++) {
    const Patch *patch = &list->pointers[i];
    uint64_t address = addresses[patch->index] + patch->offset;
    memcpy(values + patch->at, &address, sizeof address);
  }
  for (Py_ssize_t i = 0; i < list->num_maps; i++) {
    const Patch *patch = &list->maps[i];
    void *address = (void *)(addresses[patch->index] + patch->offset);
    CUresult result = replace_address((CUtensorMap *)(values + patch->at), address);
    if (result) return fail("moving a TMA descriptor", result);
  }
  for (Py_ssize_t i = 0; i < list->num_parameters; i++) parameters[i] = values + list->parameters[i];
  if (list->num_kernels) {
    CUstreamCaptureStatus status;
    CUresult result = is_capturing((CUstream)stream, &status);
    if (!result && status == CU_STREAM_CAPTURE_STATUS_NONE) {
      result = launch_as_graph(list, parameters, (CUstream)stream);
    } else if (!result) { /* separate launches, so that the captured graph keeps this call's parameters */
      result = launch_each(list, parameters, (CUstream)stream);
    }
    if (result) return fail("launching recorded kernels", result);
  }
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_driver", use_driver, METH_O, NULL},
    {"parameter_sizes", parameter_sizes, METH_O, NULL},
    {"encode", encode, METH_VARARGS, NULL},
    {"make_list", make_list, METH_VARARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launch_list", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_launch_list(void) {
  data_ptr = PyUnicode_InternFromString("data_ptr");
  return data_ptr ? PyModule_Create(&module) : NULL;
}
