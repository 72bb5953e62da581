// The Python module cake_gdn_det._C: cake_gdn_det.h as Python sees it, and, in a CUDA build, one function for each stage
// of csrc/cuda/stages.h. Pointers and streams are plain ints, so that only the Python layer knows torch.
//
// A struct becomes a class through one list of its fields; each field is both a constructor keyword and a property.

#include <pybind11/pybind11.h>

#include <cake_gdn_det/cake_gdn_det.h>

#ifdef CAKE_GDN_WITH_CUDA
#include "cuda/stages.h"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>

namespace py = pybind11;

namespace {

// clang-format off
#define PLAIN_FIELDS(X) \
    X(backend) X(device) X(num_threads) X(flags) X(scale) X(B) X(T) X(H) X(HV) X(K) X(V) X(N) X(slots) X(plan)

#define TENSOR_FIELDS(X) \
    X(q) X(k) X(v) X(g) X(beta) X(A_log) X(dt_bias) X(initial_state) X(cu_seqlens) X(cu_seqlens_host) \
    X(o) X(final_state) X(h) X(A) X(d_o) X(dht) X(dq) X(dk) X(dv) X(dg) X(dbeta) X(dA_log) X(ddt_bias) X(dh0)

#define CONSTANTS(X) \
    X(BF16) X(FP16) X(FP32) X(FP64) X(INT32) X(INT64) X(CPU) X(CUDA) X(FORWARD) X(BACKWARD) \
    X(QK_L2NORM) X(GATE) X(BETA_SIGMOID) X(NEG_EIGVAL) X(STATE_V_FIRST) X(BATCH_INVARIANT) X(CHUNK)
// clang-format on

// A field that the header gains and this list lacks stops the build: the tensors are the struct's tail.
#define COUNT(name) +1
static_assert(offsetof(cake_gdn_problem, q) + (0 TENSOR_FIELDS(COUNT)) * sizeof(cake_gdn_tensor) ==
                  sizeof(cake_gdn_problem),
              "TENSOR_FIELDS differs from cake_gdn_problem");
#undef COUNT

[[noreturn]] void raise(PyObject *type, const std::string &message) {
    PyErr_SetString(type, message.c_str());
    throw py::error_already_set();
}

void check(cake_gdn_status status) {
    if (status == CAKE_GDN_OK) {
        return;
    }
    const char *message = cake_gdn_last_error();
    switch (status) {
        case CAKE_GDN_INVALID_ARGUMENT:
        case CAKE_GDN_WORKSPACE_TOO_SMALL: raise(PyExc_ValueError, message);
        case CAKE_GDN_UNSUPPORTED: raise(PyExc_NotImplementedError, message);
        case CAKE_GDN_OUT_OF_MEMORY: raise(PyExc_MemoryError, message);
        default: raise(PyExc_RuntimeError, message);
    }
}

// ---- one field, from and to Python ----

template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
void assign(Integer &field, const char *name, PyObject *value) {
    if (!PyLong_Check(value)) {
        raise(PyExc_TypeError, std::string(name) + " must be an int, not " + Py_TYPE(value)->tp_name);
    }
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    bool fits = overflow == 0;
    if constexpr (sizeof(Integer) < sizeof(long long)) {
        fits = fits && number >= static_cast<long long>(std::numeric_limits<Integer>::min()) &&
               number <= static_cast<long long>(std::numeric_limits<Integer>::max());
    }
    if (!fits) {
        raise(PyExc_OverflowError, std::string(name) + " does not fit its C type");
    }
    field = static_cast<Integer>(number);
}

template <typename Real, std::enable_if_t<std::is_floating_point_v<Real>, int> = 0>
void assign(Real &field, const char *, PyObject *value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        throw py::error_already_set();
    }
    field = static_cast<Real>(number);
}

[[maybe_unused]] void *to_pointer(const char *name, PyObject *value) {
    if (!PyLong_Check(value)) {
        raise(PyExc_TypeError, std::string(name) + " must be an address (int), not " + Py_TYPE(value)->tp_name);
    }
    void *pointer = PyLong_AsVoidPtr(value);
    if (PyErr_Occurred()) {
        throw py::error_already_set();
    }
    return pointer;
}

template <typename T>
void assign(T *&field, const char *name, PyObject *value) {
    field = static_cast<T *>(to_pointer(name, value));
}

// The string's own bytes, which live as long as it does.
void assign(const char *&field, const char *name, PyObject *value) {
    if (value != Py_None && !PyUnicode_Check(value)) {
        raise(PyExc_TypeError, std::string(name) + " must be a str or None, not " + Py_TYPE(value)->tp_name);
    }
    Py_ssize_t size = 0;
    field = value == Py_None ? nullptr : PyUnicode_AsUTF8AndSize(value, &size);
    if (PyErr_Occurred()) {
        throw py::error_already_set();
    }
    if (field != nullptr && std::strlen(field) != static_cast<std::size_t>(size)) {
        raise(PyExc_ValueError, std::string(name) + " has a NUL character");
    }
}

// What every tensor is read by, made once: names, and torch's dtypes as the Python layer has registered them.
struct TensorProtocol {
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *dtype = PyUnicode_InternFromString("dtype");
    PyObject *stride = PyUnicode_InternFromString("stride");
    PyObject *dtypes = PyDict_New();
};

const TensorProtocol &protocol() {
    static const TensorProtocol instance;
    return instance;
}

py::object take(PyObject *fresh) {
    if (fresh == nullptr) {
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(fresh);
}

void assign_view(cake_gdn_tensor &field, const char *name, PyObject *data, PyObject *dtype, PyObject *strides) {
    if (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) > 4) {
        raise(PyExc_TypeError, std::string(name) + " must have at most four strides");
    }
    field.data = to_pointer(name, data);
    assign(field.dtype, name, dtype);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(strides); ++i) {
        assign(field.stride[i], name, PyTuple_GET_ITEM(strides, i));
    }
}

void assign(cake_gdn_tensor &field, const char *name, PyObject *value) {
    cake_gdn_tensor tensor{};
    if (PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 3) {
        assign_view(tensor, name, PyTuple_GET_ITEM(value, 0), PyTuple_GET_ITEM(value, 1), PyTuple_GET_ITEM(value, 2));
    } else if (value != Py_None) {
        const TensorProtocol &p = protocol();
        const py::object dtype = py::reinterpret_steal<py::object>(PyObject_GetAttr(value, p.dtype));
        if (!dtype) {
            PyErr_Clear();
            raise(PyExc_TypeError, std::string(name) + " must be None, a tensor or (data_ptr, dtype, strides)");
        }
        PyObject *code = PyDict_GetItemWithError(p.dtypes, dtype.ptr());
        if (code == nullptr) {
            raise(PyExc_TypeError, std::string(name) + " has an unknown dtype, " + std::string(py::str(dtype)));
        }
        const py::object data = take(PyObject_CallMethodNoArgs(value, p.data_ptr));
        const py::object strides = take(PyObject_CallMethodNoArgs(value, p.stride));
        assign_view(tensor, name, data.ptr(), code, strides.ptr());
    }
    field = tensor;
}

template <typename Number>
py::object read(const Number &field) {
    return py::cast(field);
}

template <typename T>
py::object read(T *const &field) {
    return py::cast(reinterpret_cast<std::uintptr_t>(static_cast<const void *>(field)));
}

py::object read(const char *const &field) {
    return field == nullptr ? py::object(py::none()) : py::object(py::str(field));
}

py::object read(const cake_gdn_tensor &field) {
    const int64_t (&s)[4] = field.stride;
    if (field.data == nullptr && field.dtype == 0 && (s[0] | s[1] | s[2] | s[3]) == 0) {
        return py::none();
    }
    return py::make_tuple(reinterpret_cast<std::uintptr_t>(field.data), field.dtype,
                          py::make_tuple(s[0], s[1], s[2], s[3]));
}

// ---- a struct, from its list of fields ----

template <typename Struct>
struct Field {
    const char *name;
    void (*set)(Struct &, PyObject *);
    py::object (*get)(const Struct &);
};

#define FIELD(name)                                                                        \
    Field<Struct>{#name, [](Struct &s, PyObject *value) { assign(s.name, #name, value); }, \
                  [](const Struct &s) { return read(s.name); }},

template <typename Struct, std::size_t count>
py::class_<Struct> bind_struct(py::module_ &module, const char *name, const char *doc,
                               const Field<Struct> (&fields)[count], void (*prepare)(Struct &)) {
    py::class_<Struct> cls(module, name, doc);
    cls.def(py::init([&fields, name, prepare](const py::kwargs &arguments) {
        Struct s{};
        prepare(s);
        PyObject *key = nullptr, *value = nullptr;
        Py_ssize_t position = 0;
        while (PyDict_Next(arguments.ptr(), &position, &key, &value)) {
            std::size_t at = 0;
            while (at < count && PyUnicode_CompareWithASCIIString(key, fields[at].name) != 0) ++at;
            if (at == count) {
                raise(PyExc_TypeError, std::string(name) + " has no field " + py::cast<std::string>(key));
            }
            fields[at].set(s, value);
        }
        return s;
    }));
    for (const Field<Struct> &field : fields) {
        cls.def_property(
            field.name, [get = field.get](const Struct &s) { return get(s); },
            [set = field.set](Struct &s, const py::object &value) { set(s, value.ptr()); });
    }
    return cls;
}

void bind_problem(py::module_ &module) {
    using Struct = cake_gdn_problem;
    static const Field<Struct> fields[] = {PLAIN_FIELDS(FIELD) TENSOR_FIELDS(FIELD)};
    const auto prepare = [](Struct &s) { s.struct_size = sizeof s; };
    bind_struct<Struct>(module, "Problem",
                        "One call, cake_gdn_problem of cake_gdn_det.h. A tensor field is given as None, as a tensor "
                        "whose dtype is a key of `dtypes`, or as (data_ptr, dtype, strides in elements), and read as "
                        "the last. Whoever fills it keeps the memory alive.",
                        fields, prepare)
        .def_static(
            "of",
            [prepare](const py::args &values) {
                if (values.size() != std::size(fields)) {
                    raise(PyExc_TypeError, "Problem.of takes " + std::to_string(std::size(fields)) + " values, not " +
                                               std::to_string(values.size()));
                }
                Struct s{};
                prepare(s);
                PyObject *const *value = PySequence_Fast_ITEMS(values.ptr());
                for (const Field<Struct> &field : fields) field.set(s, *value++);
                return s;
            },
            "All fields in order, with no names: a third of the time.");
}

using Entry = cake_gdn_status(const cake_gdn_problem *, void *, size_t, void *);

template <Entry *entry>
void run(const cake_gdn_problem &problem, std::uintptr_t workspace, size_t bytes, std::uintptr_t stream) {
    cake_gdn_status status;
    {
        py::gil_scoped_release release;
        status = entry(&problem, reinterpret_cast<void *>(workspace), bytes, reinterpret_cast<void *>(stream));
    }
    check(status);
}

#ifdef CAKE_GDN_WITH_CUDA
#define STAGE_FIELD(type, name) FIELD(name)

template <auto *entry, typename Params>
void run_stage(const Params &params, std::uintptr_t stream) {
    cake_gdn_status status;
    {
        py::gil_scoped_release release;
        status = entry(&params, reinterpret_cast<void *>(stream));
    }
    check(status);
}

// One class and one function a stage, from the lists of stages.h and params/.
void bind_stages(py::module_ &module) {
#define BIND_STAGE(stage, STAGE, Params)                                                                           \
    {                                                                                                              \
        using Struct = cake_gdn_##stage##_params;                                                                  \
        static const Field<Struct> fields[] = {CAKE_GDN_##STAGE##_PARAMS(STAGE_FIELD)};                            \
        bind_struct<Struct>(module, Params, "Params of a stage of csrc/cuda/stages.h; pointers are ints.", fields, \
                            [](Struct &) {});                                                                      \
        module.def(#stage, &run_stage<cake_gdn_run_##stage, Struct>, py::arg("params"), py::arg("stream"),         \
                   "Queues the stage on a stream. Releases the GIL.");                                             \
    }
    CAKE_GDN_STAGES(BIND_STAGE)
#undef BIND_STAGE
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
    if (cake_gdn_abi_version() != CAKE_GDN_ABI_VERSION) {
        raise(PyExc_ImportError, "libcake_gdn_det has ABI version " + std::to_string(cake_gdn_abi_version()) +
                                     ", cake_gdn_det._C was built for " + std::to_string(CAKE_GDN_ABI_VERSION));
    }
    m.doc() = "cake_gdn_det.h for Python: pointers and streams are ints, a status is an exception.";

    m.attr("dtypes") = py::reinterpret_borrow<py::dict>(protocol().dtypes);
    bind_problem(m);
    m.def("forward", &run<cake_gdn_forward>, py::arg("problem"), py::arg("workspace_ptr"), py::arg("workspace_bytes"),
          py::arg("stream"), "Runs the forward. Releases the GIL.");
    m.def("backward", &run<cake_gdn_backward>, py::arg("problem"), py::arg("workspace_ptr"), py::arg("workspace_bytes"),
          py::arg("stream"), "Runs the backward. Releases the GIL.");
    m.def(
        "workspace_size",
        [](const cake_gdn_problem &problem, int direction) {
            size_t bytes = 0;
            check(cake_gdn_workspace_size(&problem, static_cast<cake_gdn_direction>(direction), &bytes));
            return bytes;
        },
        py::arg("problem"), py::arg("direction"), "Scratch bytes that the call needs.");
    m.def("abi_version", &cake_gdn_abi_version, "CAKE_GDN_ABI_VERSION of the library.");
    m.def("build_info", &cake_gdn_build_info, "How the library was built: a JSON object.");
    m.def("state_slots", &cake_gdn_state_slots, py::arg("B"), py::arg("T"), "Rows of the saved chunk states h.");
    m.def("state_width", &cake_gdn_state_width, py::arg("backend"), py::arg("V"), "Elements of a row of h.");
    m.def("state_dtype", &cake_gdn_state_dtype, py::arg("backend"), py::arg("dtype"), "Element type of h.");

#define CONSTANT(name) m.attr(#name) = static_cast<int>(CAKE_GDN_##name);
    CONSTANTS(CONSTANT);
#undef CONSTANT

#ifdef CAKE_GDN_WITH_CUDA
    bind_stages(m);
#endif
}
