/* A CUDA driver that launches nothing and writes down what it is asked for. Kernels have one parameter, a pointer. */
#include <cuda.h>
#include <stdio.h>
#include <string.h>

static char events[1 << 16];
static long num_graphs, num_executables; /* that exist */
static uintptr_t last_executable;
#define NOTE(...) snprintf(events + strlen(events), sizeof events - strlen(events), __VA_ARGS__)

const char *take_events(void) {
  static char taken[sizeof events];
  strcpy(taken, events), events[0] = 0;
  return taken;
}
long graphs(void) { return num_graphs; }
long executable_graphs(void) { return num_executables; }

static void note_kernel(const char *what, CUfunction kernel, unsigned grid, unsigned threads, unsigned shared,
                        void **parameters) {
  NOTE("%s %ld, %u, %u, %u, %ld; ", what, (long)kernel, grid, threads, shared, **(long **)parameters);
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
  note_kernel("launch", kernel, x, threads, shared, parameters);
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { /* stream 7 captures, stream 9 fails */
  *status = stream == (CUstream)7 ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return stream == (CUstream)9 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
  *graph = (CUgraph)1;
  return num_graphs++, CUDA_SUCCESS;
}
CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t num_before,
                              const CUDA_KERNEL_NODE_PARAMS *launch) {
  *node = (CUgraphNode)launch->func;
  NOTE("node %ld after %ld; ", (long)*node, num_before ? (long)*before : 0);
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
  *executable = (CUgraphExec)++last_executable;
  return num_executables++, CUDA_SUCCESS;
}
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec executable, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *launch) {
  note_kernel("set", (CUfunction)node, launch->gridDimX, launch->blockDimX, launch->sharedMemBytes, launch->kernelParams);
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  NOTE("run %ld on %ld; ", (long)executable, (long)stream);
  return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) { return num_graphs--, CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec executable) { return num_executables--, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult result, const char **name) { return *name = "INVALID_HANDLE", CUDA_SUCCESS; }
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
