// Python objects and C++ values, by those parts of Python's C API that every version from 3.10 on
// has under the same names (Py_LIMITED_API), so that one file serves all of them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/api.h"

namespace qfx::python {

// An exception of Python is set.
struct Raised {};

// Owns a reference, or is null.
class Object {
 public:
  Object() = default;
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  ~Object() { Py_XDECREF(object_); }

  // A new reference that a call returned; null means that it raised.
  static Object taken(PyObject* object) {
    if (object == nullptr) throw Raised();
    Object found;
    found.object_ = object;
    return found;
  }
  static Object shared(PyObject* object) {
    Py_INCREF(object);
    return taken(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Another thread may run Python while it lives.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Raises what a call of api.h has failed with.
void check(QfxStatus status);

// The results of a call of api.h that takes a QfxTake.
struct ResultRow {
  std::vector<std::string> texts;
  std::vector<int64_t> numbers;
};

template <typename Call>
std::vector<ResultRow> rows_of(const Call& call) {
  std::vector<ResultRow> rows;
  const QfxTake take = [](void* to, const char* const* texts, const int64_t* numbers,
                          int64_t count) {
    ResultRow row;
    for (; *texts != nullptr; ++texts) row.texts.emplace_back(*texts);
    row.numbers.assign(numbers, numbers + count);
    static_cast<std::vector<ResultRow>*>(to)->push_back(std::move(row));
  };
  check(call(take, &rows));
  return rows;
}

Object none();
Object object_of(bool value);
Object object_of(int64_t value);
Object object_of(uint64_t value);
Object object_of(double value);
Object object_of(const std::string& text);
Object list_of(const std::vector<int64_t>& numbers);
Object tuple_of(const std::vector<int64_t>& numbers);
// Takes the objects.
Object list_of(std::vector<Object> objects);
// The first texts of rows.
Object texts_of(const std::vector<ResultRow>& rows);
void set_item(const Object& dict, const char* name, const Object& value);

Object attribute(PyObject* object, const char* name);
Object imported(const char* module);
// A call without arguments, and with one.
Object called(PyObject* function);
Object called(PyObject* function, PyObject* argument);

int64_t integer_of(PyObject* object);
std::vector<int64_t> integers_of(PyObject* sequence);
std::string text_of(PyObject* text);

// The arguments of a call, by position or name, into variables by PyArg_Parse's format.
template <typename... Variables>
void read_arguments(PyObject* args, PyObject* names_and_values, const char* format,
                    std::vector<const char*> names, Variables*... variables) {
  names.push_back(nullptr);
  auto** c_names = const_cast<char**>(names.data());
  if (!PyArg_ParseTupleAndKeywords(args, names_and_values, format, c_names, variables...)) {
    throw Raised();
  }
}

// What `run` returns, an Object; null with an exception of Python where it throws.
template <typename Run>
PyObject* result_of(const Run& run) noexcept {
  try {
    return run().release();
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_RuntimeError, why.what());
    return nullptr;
  }
}

// What Python calls: `function` returns an Object, or throws Raised.
template <auto function>
PyObject* entry(PyObject* self, PyObject* args, PyObject* names_and_values) {
  return result_of([&] { return function(self, args, names_and_values); });
}

template <auto function>
PyObject* entry_without_arguments(PyObject* /*module*/, PyObject* /*nothing*/) {
  return result_of([] { return function(); });
}

// The row of a table of functions or methods; its documentation begins with the signature.
template <auto function>
PyMethodDef method(const char* name, const char* doc) {
  if constexpr (std::is_invocable_v<decltype(function)>) {
    return {name, &entry_without_arguments<function>, METH_NOARGS, doc};
  } else {
    // C's type of a function says nothing of the names that METH_KEYWORDS brings.
    auto* called = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entry<function>));
    return {name, called, METH_VARARGS | METH_KEYWORDS, doc};
  }
}

// Adds a table of functions, which a row of nulls ends.
inline void add_functions(PyObject* module, PyMethodDef* functions) {
  if (PyModule_AddFunctions(module, functions) != 0) throw Raised();
}

// What Python calls for a property: `get` returns an Object from self, or throws Raised.
template <auto get>
PyObject* property(PyObject* self, void* /*closure*/) {
  return result_of([&] { return get(self); });
}

// A class of Python that owns a T. `make` returns a new T* from the arguments of __new__.
template <typename T>
struct Instance {
  PyObject_HEAD;
  T* held;
};

template <typename T>
T& held(PyObject* self) {
  return *reinterpret_cast<Instance<T>*>(self)->held;
}

template <typename T, T* (*make)(PyObject*, PyObject*)>
PyObject* make_instance(PyTypeObject* type, PyObject* args, PyObject* names_and_values) {
  return result_of([&] {
    std::unique_ptr<T> made(make(args, names_and_values));
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Object self = Object::taken(allocate(type, 0));
    reinterpret_cast<Instance<T>*>(self.get())->held = made.release();
    return self;
  });
}

template <typename T>
void free_instance(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Instance<T>*>(self)->held;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// The slots come last; those of making and freeing are added here. `name` lives as long as the
// process, as do the methods that slots point to.
template <typename T, T* (*make)(PyObject*, PyObject*)>
void add_class(PyObject* module, const char* name, const char* doc,
               std::vector<PyType_Slot> slots) {
  const std::vector<PyType_Slot> own = {
      {Py_tp_doc, const_cast<char*>(doc)},
      {Py_tp_new, reinterpret_cast<void*>(&make_instance<T, make>)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&free_instance<T>)},
      {0, nullptr}};
  slots.insert(slots.end(), own.begin(), own.end());
  static const std::string whole = std::string("qfx._C.") + name;  // one for each T
  PyType_Spec spec = {whole.c_str(), sizeof(Instance<T>), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  Object type = Object::taken(PyType_FromSpec(&spec));
  if (PyModule_AddObject(module, name, type.get()) != 0) throw Raised();
  type.release();
}

}  // namespace qfx::python
