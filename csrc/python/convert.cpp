#include "python/convert.h"

namespace qfx::python {
namespace {

PyObject* exception_of(QfxStatus status) {
  if (status == kQfxWrongValue) return PyExc_ValueError;
  if (status == kQfxWrongIndex) return PyExc_IndexError;
  if (status == kQfxWrongType) return PyExc_TypeError;
  if (status == kQfxNoMemory) return PyExc_MemoryError;
  return PyExc_RuntimeError;
}

}  // namespace

void check(QfxStatus status) {
  if (status == kQfxDone) return;
  if (status != kQfxStopped) PyErr_SetString(exception_of(status), qfx_api_error());
  throw Raised();
}

Object none() { return Object::shared(Py_None); }

Object object_of(bool value) { return Object::taken(PyBool_FromLong(value)); }

Object object_of(int64_t value) { return Object::taken(PyLong_FromLongLong(value)); }

Object object_of(uint64_t value) { return Object::taken(PyLong_FromUnsignedLongLong(value)); }

Object object_of(double value) { return Object::taken(PyFloat_FromDouble(value)); }

Object object_of(const std::string& text) {
  return Object::taken(
      PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

Object list_of(const std::vector<int64_t>& numbers) {
  std::vector<Object> objects;
  for (int64_t number : numbers) objects.push_back(object_of(number));
  return list_of(std::move(objects));
}

Object tuple_of(const std::vector<int64_t>& numbers) {
  return Object::taken(PyList_AsTuple(list_of(numbers).get()));
}

Object list_of(std::vector<Object> objects) {
  Object list = Object::taken(PyList_New(static_cast<Py_ssize_t>(objects.size())));
  for (size_t i = 0; i < objects.size(); ++i) {
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), objects[i].release());
  }
  return list;
}

Object texts_of(const std::vector<ResultRow>& rows) {
  std::vector<Object> texts;
  for (const ResultRow& row : rows) texts.push_back(object_of(row.texts.at(0)));
  return list_of(std::move(texts));
}

void set_item(const Object& dict, const char* name, const Object& value) {
  if (PyDict_SetItemString(dict.get(), name, value.get()) != 0) throw Raised();
}

Object attribute(PyObject* object, const char* name) {
  return Object::taken(PyObject_GetAttrString(object, name));
}

Object imported(const char* module) { return Object::taken(PyImport_ImportModule(module)); }

Object called(PyObject* function) {
  return Object::taken(PyObject_CallFunctionObjArgs(function, nullptr));
}

Object called(PyObject* function, PyObject* argument) {
  return Object::taken(PyObject_CallFunctionObjArgs(function, argument, nullptr));
}

int64_t integer_of(PyObject* object) {
  const int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred() != nullptr) throw Raised();
  return found;
}

std::vector<int64_t> integers_of(PyObject* sequence) {
  const Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0) throw Raised();
  std::vector<int64_t> found;
  found.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    found.push_back(integer_of(Object::taken(PySequence_GetItem(sequence, i)).get()));
  }
  return found;
}

std::string text_of(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (data == nullptr) throw Raised();
  return {data, static_cast<size_t>(size)};
}

}  // namespace qfx::python
