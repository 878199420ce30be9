/* A prepared launch of one kernel as a Python object: see `triton_launching.py`.

   Triton's own launcher parses all arguments of a kernel in every call, about 35 of them. Here only the stream and the
   addresses of tensors are arguments. Everything else is written down once. cuLaunchKernelEx is given by its address,
   so this file is linked with nothing. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#define MOST 128 /* parameters of a kernel */

typedef CUresult (*Launcher)(const CUlaunchConfig *, CUfunction, void **, void **);

typedef struct {
    PyObject_HEAD
    vectorcallfunc called;
    Launcher launch;
    CUfunction function;
    CUlaunchConfig config;
    CUlaunchAttribute dependent;
    PyObject *enter, *exit; /* lists of hooks: while one has a member, `otherwise` is called instead */
    PyObject *otherwise;
    Py_ssize_t given;    /* the least number of addresses in a call */
    Py_ssize_t count;    /* parameters of the kernel */
    int16_t slots[MOST]; /* of each parameter: which address it is counted from, or -1 for a constant */
    uint64_t values[MOST]; /* of each parameter: how far from there, or the constant */
} Launch;

static PyObject *launch_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    Launch *self = (Launch *)object;
    Py_ssize_t given = PyVectorcall_NARGS(flags);
    if (PyList_GET_SIZE(self->enter) || PyList_GET_SIZE(self->exit))
        return PyObject_Vectorcall(self->otherwise, args, flags, names);
    if (given < self->given + 1 || (names && PyTuple_GET_SIZE(names))) {
        PyErr_Format(PyExc_TypeError, "a launch needs a stream and %zd addresses", self->given);
        return NULL;
    }
    CUlaunchConfig config = self->config;
    config.hStream = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    uint64_t values[MOST];
    void *parameters[MOST];
    for (Py_ssize_t i = 0; i < self->count; i++) {
        PyObject *address = self->slots[i] < 0 ? NULL : args[1 + self->slots[i]];
        values[i] = self->values[i];
        if (address) values[i] = address == Py_None ? 0 : values[i] + PyLong_AsUnsignedLongLong(address);
        parameters[i] = &values[i];
    }
    if (PyErr_Occurred()) return NULL;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = self->launch(&config, self->function, parameters, NULL);
    Py_END_ALLOW_THREADS
    /* A thread that has not used the GPU yet: Triton gives it a context. */
    if (result == CUDA_ERROR_INVALID_CONTEXT) return PyObject_Vectorcall(self->otherwise, args, flags, names);
    if (result != CUDA_SUCCESS) {
        PyErr_Format(PyExc_RuntimeError, "kalmannorm: a kernel was not launched, CUDA error %d", (int)result);
        return NULL;
    }
    Py_RETURN_NONE;
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg) {
    Launch *self = (Launch *)object;
    Py_VISIT(self->enter);
    Py_VISIT(self->exit);
    Py_VISIT(self->otherwise);
    return 0;
}

static int launch_clear(PyObject *object) {
    Launch *self = (Launch *)object;
    Py_CLEAR(self->enter);
    Py_CLEAR(self->exit);
    Py_CLEAR(self->otherwise);
    return 0;
}

static void launch_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    launch_clear(object);
    PyObject_GC_Del(object);
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kalmannorm_launcher.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launch, called),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = launch_traverse,
    .tp_clear = launch_clear,
    .tp_dealloc = launch_dealloc,
};

/* prepare(launcher, function, (x, y, z), threads, shared, dependent, slots, values, enter, exit, otherwise) */
static PyObject *prepare(PyObject *module, PyObject *args) {
    unsigned long long launcher, function;
    unsigned int x, y, z, threads, shared;
    int dependent;
    PyObject *slots, *values, *enter, *exit, *otherwise;
    if (!PyArg_ParseTuple(args, "KK(III)IIpO!O!O!O!O", &launcher, &function, &x, &y, &z, &threads, &shared, &dependent,
                          &PyList_Type, &slots, &PyList_Type, &values, &PyList_Type, &enter, &PyList_Type, &exit,
                          &otherwise))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(slots);
    if (count > MOST || PyList_GET_SIZE(values) != count) {
        PyErr_SetString(PyExc_ValueError, "too many parameters, or not one value for each");
        return NULL;
    }
    Launch *self = PyObject_GC_New(Launch, &LaunchType);
    if (!self) return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof(Launch) - sizeof(PyObject));
    self->called = launch_call;
    self->launch = (Launcher)(uintptr_t)launcher;
    self->function = (CUfunction)(uintptr_t)function;
    self->count = count;
    Py_INCREF(enter);
    self->enter = enter;
    Py_INCREF(exit);
    self->exit = exit;
    Py_INCREF(otherwise);
    self->otherwise = otherwise;
    self->config.gridDimX = x;
    self->config.gridDimY = y;
    self->config.gridDimZ = z;
    self->config.blockDimX = threads;
    self->config.blockDimY = self->config.blockDimZ = 1;
    self->config.sharedMemBytes = shared;
    if (dependent) {
        self->dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        self->dependent.value.programmaticStreamSerializationAllowed = 1;
        self->config.attrs = &self->dependent;
        self->config.numAttrs = 1;
    }
    PyObject_GC_Track((PyObject *)self);
    for (Py_ssize_t i = 0; i < count; i++) {
        long slot = PyLong_AsLong(PyList_GET_ITEM(slots, i));
        self->values[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(values, i));
        if (PyErr_Occurred() || slot > MOST) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many addresses");
            Py_DECREF(self);
            return NULL;
        }
        self->slots[i] = slot < 0 ? -1 : (int16_t)slot;
        if (slot >= self->given) self->given = slot + 1;
    }
    return (PyObject *)self;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS, "A launch that is called with a stream and addresses."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kalmannorm_launcher", NULL, -1, functions};

PyMODINIT_FUNC PyInit_kalmannorm_launcher(void) {
    if (PyType_Ready(&LaunchType) < 0) return NULL;
    return PyModule_Create(&definition);
}
