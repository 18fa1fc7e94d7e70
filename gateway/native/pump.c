/* The pump of a stream: reads an engine's socket and writes to a client's, one read and one write per event.
 *
 * A read is passed on only if it is whole HTTP chunks of whole SSE events in which nothing has to be read. Every other
 * read is handed back with its bytes, and the Python path goes on as if it had read them: gateway/relay/answer.py is
 * the definition of what happens to a stream. The pump decides nothing.
 *
 * Only the limited API is used, so one wheel serves every CPython from 3.11 on. Calls hold the GIL; sockets do not
 * block. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE /* memmem */
#include <Python.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#include <time.h>

#define READ_AT_MOST 65536
#define SIZE_DIGITS 7 /* hexadecimal digits of a chunk's size; a larger chunk is not passed on */

typedef struct {
    PyObject_HEAD
    int source;       /* descriptor of the engine's socket */
    int sink;         /* descriptor of the client's socket */
    Py_ssize_t reads; /* chunks passed on */
    double heard_at;  /* CLOCK_MONOTONIC in seconds of the last read; 0 before the first */
} Pump;

static char buffer[READ_AT_MOST]; /* holds nothing between two calls */

static int has(const char *data, size_t size, const char *marker, size_t length)
{
    return memmem(data, size, marker, length) != NULL;
}

/* Whether an event's bytes must be read: they may tell usage, an error or the end. */
static int telling(const char *data, size_t size)
{
    return has(data, size, "\"usage\"", 7) || has(data, size, "\"error\"", 7) ||
           (memchr(data, 'D', size) != NULL && has(data, size, "[DONE]", 6));
}

/* Number of chunks in `data`, or 0 if anything in it is not a whole chunk of whole events of deltas. */
static Py_ssize_t whole_chunks(const char *data, size_t size)
{
    Py_ssize_t chunks = 0;
    size_t at = 0;
    while (at < size) {
        size_t length = 0, digits = 0;
        for (; at < size && digits <= SIZE_DIGITS; at++, digits++) {
            char digit = data[at];
            if (digit >= '0' && digit <= '9' && (digit != '0' || digits))
                length = length * 16 + (size_t)(digit - '0');
            else if (digit >= 'a' && digit <= 'f')
                length = length * 16 + (size_t)(digit - 'a' + 10);
            else
                break;
        }
        if (digits == 0 || digits > SIZE_DIGITS || length < 2 || size - at < length + 4)
            return 0;
        const char *event = data + at + 2, *end = event + length;
        if (data[at] != '\r' || data[at + 1] != '\n' || end[-2] != '\n' || end[-1] != '\n' || end[0] != '\r' ||
            end[1] != '\n' || telling(event, length))
            return 0;
        at += length + 4;
        chunks++;
    }
    return chunks;
}

/* Call `returned(data, sent)`. */
static PyObject *hand_back(PyObject *returned, const char *data, size_t size, size_t sent)
{
    return PyObject_CallFunction(returned, "y#n", data, (Py_ssize_t)size, (Py_ssize_t)sent);
}

/* None, counted. The headers' own macro does not count it from Python 3.12 on, where nobody counts None; in 3.11, which
 * a wheel that was built there serves too, the process would die as soon as None's count is 0. */
static PyObject *none(void)
{
    return Py_NewRef(Py_None);
}

static PyObject *step(PyObject *object, PyObject *returned)
{
    Pump *self = (Pump *)object;
    ssize_t size = recv(self->source, buffer, READ_AT_MOST, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return none();
    if (size <= 0) /* the end, or an error: the transport will meet it again */
        return hand_back(returned, buffer, 0, 0);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    self->heard_at = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    Py_ssize_t chunks = whole_chunks(buffer, (size_t)size);
    if (!chunks)
        return hand_back(returned, buffer, (size_t)size, 0);
    ssize_t sent = send(self->sink, buffer, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) /* the client's socket is full or broken: its transport will meet that */
        return hand_back(returned, buffer, (size_t)size, 0);
    self->reads += chunks;
    if (sent < size)
        return hand_back(returned, buffer, (size_t)size, (size_t)sent);
    return none();
}

static PyObject *new_pump(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"source", "sink", NULL};
    int source, sink;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "ii", names, &source, &sink))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Pump *self = (Pump *)allocate(type, 0);
    if (self != NULL) {
        self->source = source;
        self->sink = sink;
    }
    return (PyObject *)self;
}

static void free_pump(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"step", step, METH_O,
     "Pass on one read. Call `returned(data, sent)` with a read that is not passed on: `sent` bytes of `data` went out "
     "already, and then the rest goes on as it is; no data: the engine's end or an error."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"source", T_INT, offsetof(Pump, source), READONLY, "descriptor of the engine's socket"},
    {"sink", T_INT, offsetof(Pump, sink), READONLY, "descriptor of the client's socket"},
    {"reads", T_PYSSIZET, offsetof(Pump, reads), READONLY, "chunks passed on"},
    {"heard_at", T_DOUBLE, offsetof(Pump, heard_at), READONLY, "seconds of the monotonic clock of the last read"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, new_pump}, {Py_tp_dealloc, free_pump}, {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};
static PyType_Spec spec = {"gateway.native.pump.Pump", sizeof(Pump), 0, Py_TPFLAGS_DEFAULT, slots};

static int begin(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Pump", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, begin}, {0, NULL}};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "pump", "Pump of a stream: one read and one write per event, without Python.", 0, NULL,
    module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_pump(void)
{
    return PyModuleDef_Init(&module);
}
