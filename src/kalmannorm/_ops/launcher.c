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
    PyObject *runtime;    /* Triton's settings: its hooks are asked for at every launch */
    PyObject *chains[2];  /* the chains of hooks that it had, */
    PyObject *calls[2];   /* and their lists */
    PyObject *otherwise;  /* called instead while there is a hook */
    Py_ssize_t given;    /* the least number of addresses in a call */
    Py_ssize_t count;    /* parameters of the kernel */
    int16_t slots[MOST]; /* of each parameter: which address it is counted from, or -1 for a constant */
    uint64_t values[MOST]; /* of each parameter: how far from there, or the constant */
} Launch;

static PyObject *hooks[2]; /* their names */

/* Whether somebody watches launches: 1 or 0, or -1 with an error. */
static int hooked(Launch *self) {
    for (int i = 0; i < 2; i++) {
        PyObject *chain = PyObject_GetAttr(self->runtime, hooks[i]);
        if (!chain) return -1;
        int watched = chain != self->chains[i] || PyList_GET_SIZE(self->calls[i]);
        Py_DECREF(chain);
        if (watched) return 1;
    }
    return 0;
}

static PyObject *launch_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    Launch *self = (Launch *)object;
    Py_ssize_t given = PyVectorcall_NARGS(flags);
    int watched = hooked(self);
    if (watched < 0) return NULL;
    if (watched) return PyObject_Vectorcall(self->otherwise, args, flags, names);
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
        PyErr_Format(PyExc_RuntimeError,
                     "kalmannorm: a kernel was not launched, CUDA error %d, perhaps of an earlier kernel", (int)result);
        return NULL;
    }
    Py_RETURN_NONE;
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg) {
    Launch *self = (Launch *)object;
    Py_VISIT(self->runtime);
    for (int i = 0; i < 2; i++) {
        Py_VISIT(self->chains[i]);
        Py_VISIT(self->calls[i]);
    }
    Py_VISIT(self->otherwise);
    return 0;
}

/* It frees what may refer to this object. What a call needs stays: somebody may still call it. */
static int launch_clear(PyObject *object) {
    Launch *self = (Launch *)object;
    PyObject *otherwise = self->otherwise;
    Py_INCREF(Py_None);
    self->otherwise = Py_None;
    Py_XDECREF(otherwise);
    return 0;
}

static void launch_dealloc(PyObject *object) {
    Launch *self = (Launch *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->runtime);
    for (int i = 0; i < 2; i++) {
        Py_XDECREF(self->chains[i]);
        Py_XDECREF(self->calls[i]);
    }
    Py_XDECREF(self->otherwise);
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

/* prepare(launcher, function, (x, y, z), threads, shared, dependent, slots, values, runtime, otherwise)

   The lists of hooks are those of `runtime` now. */
static PyObject *prepare(PyObject *module, PyObject *args) {
    unsigned long long launcher, function;
    unsigned int x, y, z, threads, shared;
    int dependent;
    PyObject *slots, *values, *runtime, *otherwise;
    if (!PyArg_ParseTuple(args, "KK(III)IIpO!O!OO", &launcher, &function, &x, &y, &z, &threads, &shared, &dependent,
                          &PyList_Type, &slots, &PyList_Type, &values, &runtime, &otherwise))
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
    Py_INCREF(runtime);
    self->runtime = runtime;
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
    for (int i = 0; i < 2; i++) {
        self->chains[i] = PyObject_GetAttr(runtime, hooks[i]);
        self->calls[i] = self->chains[i] ? PyObject_GetAttrString(self->chains[i], "calls") : NULL;
        if (!self->calls[i] || !PyList_Check(self->calls[i])) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a chain of hooks has no list");
            Py_DECREF(self);
            return NULL;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long slot = PyLong_AsLong(PyList_GET_ITEM(slots, i));
        self->values[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(values, i));
        if (PyErr_Occurred() || slot >= MOST) {
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
    hooks[0] = PyUnicode_InternFromString("launch_enter_hook");
    hooks[1] = PyUnicode_InternFromString("launch_exit_hook");
    if (!hooks[0] || !hooks[1]) return NULL;
    return PyModule_Create(&definition);
}
