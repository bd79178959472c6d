#include "stamps.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fingerprint.h"
#include "tensor_address.h"

namespace qfx {
namespace {

namespace py = pybind11;

// The referent of a weak reference, null if it is dead.
py::object referent(const py::object& reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  PyWeakref_GetRef(reference.ptr(), &object);
  return py::reinterpret_steal<py::object>(object);
#else
  PyObject* object = PyWeakref_GetObject(reference.ptr());
  return object == Py_None ? py::object() : py::reinterpret_borrow<py::object>(object);
#endif
}

// How a tensor is read: by Python's own protocol, whose meaning every torch keeps. Reading torch's
// C++ objects would tie this library to the layout that one torch version gives them.
class Reader {
 public:
  Reader() {
    const py::object tensor = py::module_::import("torch").attr("Tensor");
    version_ = tensor.attr("_version");
    storage_ = tensor.attr("untyped_storage");
    strided_ = py::module_::import("torch").attr("strided");
  }

  uintptr_t address(PyObject* tensor) const { return address_(tensor); }

  int64_t version(PyObject* tensor) const {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    return checked(Py_TYPE(version_.ptr())->tp_descr_get(version_.ptr(), tensor, type))
        .cast<int64_t>();
  }
  // None for what was made in inference mode: reading the version of that is a RuntimeError.
  std::optional<int64_t> version_if_counted(PyObject* tensor) const {
    try {
      return version(tensor);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_RuntimeError)) throw;
      return std::nullopt;
    }
  }

  // The elements of a tensor in the memory of the CPU; nothing of another.
  Region region(PyObject* object) const {
    const py::handle tensor(object);
    const bool here = tensor.attr("device").attr("type").cast<std::string>() == "cpu" &&
                      py::object(tensor.attr("layout")).is(strided_);
    if (!here) return {};
    return {address(object), tensor.attr("shape").cast<std::vector<int64_t>>(),
            tensor.attr("stride")().cast<std::vector<int64_t>>(),
            tensor.attr("element_size")().cast<int64_t>()};
  }

  // The Python object of the storage: the same one as long as the storage lives.
  py::object storage(PyObject* tensor) const { return call(storage_, tensor); }

 private:
  static py::object checked(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }
  static py::object call(const py::object& method, PyObject* tensor) {
    return checked(PyObject_CallOneArg(method.ptr(), tensor));
  }

  py::object version_, storage_, strided_;
  TensorAddress address_;
};

// The weights of one call: arguments[p] for p in `positions`. It keeps no tensor or storage alive.
class Snapshot {
 public:
  Snapshot(const py::tuple& arguments, const std::vector<size_t>& positions) {
    for (size_t position : positions) {
      const py::object weight = arguments[position];
      const py::object storage = reader_.storage(weight.ptr());
      const Sample sample(reader_.region(weight.ptr()));
      stamps_.push_back({position, weight.ptr(), reader_.address(weight.ptr()),
                         reader_.version_if_counted(weight.ptr()), py::weakref(storage), sample,
                         sample.hash()});
      for (const py::handle& object : {py::handle(weight), py::handle(storage)}) {
        read_.push_back(reinterpret_cast<const char*>(object.ptr()));
        read_.push_back(reinterpret_cast<const char*>(object.attr("_cdata").cast<uintptr_t>()));
      }
    }
  }

  // Same tensors, with the same storages, addresses and versions.
  bool same_tensors(const py::tuple& arguments) const {
    for (const Stamp& stamp : stamps_) {
      if (stamp.position >= arguments.size()) return false;
      if (!same(stamp, PyTuple_GET_ITEM(arguments.ptr(), stamp.position))) return false;
    }
    return true;
  }

  // The same tensors, and the same bytes where one looks. Weights that other memory has displaced
  // from the caches are fetched all at once.
  bool unchanged(const py::tuple& arguments) const {
    for (const char* object : read_) {
      __builtin_prefetch(object);
      __builtin_prefetch(object + Sample::kLine);
    }
    for (const Stamp& stamp : stamps_) stamp.sample.prefetch();
    if (!same_tensors(arguments)) return false;  // and with them the memory of the samples
    for (const Stamp& stamp : stamps_) {
      if (stamp.sample.hash() != stamp.hash) return false;
    }
    return true;
  }

 private:
  struct Stamp {
    size_t position;
    const PyObject* tensor;  // only compared: the tensor may be dead
    uintptr_t address;
    std::optional<int64_t> version;
    py::object storage;  // weak, so that no later storage is taken for this one
    Sample sample;
    uint64_t hash;
  };

  bool same(const Stamp& stamp, PyObject* weight) const {
    return weight == stamp.tensor && reader_.address(weight) == stamp.address &&
           (!stamp.version || reader_.version(weight) == *stamp.version) &&
           reader_.storage(weight).is(referent(stamp.storage));
  }

  Reader reader_;
  std::vector<Stamp> stamps_;
  std::vector<const char*> read_;  // where what the stamps are compared with was, to be prefetched
};

// inputs[i] = arguments[order[i]], or the referent of references[-1 - order[i]] where that is
// negative.
class Gather {
 public:
  explicit Gather(std::vector<int64_t> order) : order_(std::move(order)) {}

  // None if a referent is dead.
  py::object operator()(const py::tuple& arguments, const py::tuple& references) const {
    py::tuple inputs(order_.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      const int64_t from = order_[i];
      py::object input = from >= 0 ? py::object(arguments[static_cast<size_t>(from)])
                                   : referent(references[static_cast<size_t>(-1 - from)]);
      if (!input) return py::none();
      PyTuple_SET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i), input.release().ptr());
    }
    return inputs;
  }

 private:
  std::vector<int64_t> order_;
};

std::optional<uint64_t> content(const py::object& tensor) {
  const Region region = Reader().region(tensor.ptr());
  if (region.element == 0 || !tensor.attr("is_contiguous")().cast<bool>()) return std::nullopt;
  const auto count = tensor.attr("numel")().cast<size_t>() * static_cast<size_t>(region.element);
  const py::gil_scoped_release released;
  return hash_bytes(reinterpret_cast<const char*>(region.address), count);
}

int64_t sample_size(const py::object& tensor) {
  const Region region = Reader().region(tensor.ptr());
  return region.element == 0 ? 0 : Sample(region).bytes() / region.element;
}

}  // namespace

void define_stamps(py::module_& m) {
  py::class_<Snapshot>(m, "Snapshot", "The state of arguments[p], p in positions: tensors.")
      .def(py::init<const py::tuple&, const std::vector<size_t>&>(), py::arg("arguments"),
           py::arg("positions"))
      .def("same_tensors", &Snapshot::same_tensors, py::arg("arguments"),
           "Whether these are the same tensors, with the same storages, addresses and versions.")
      .def("unchanged", &Snapshot::unchanged, py::arg("arguments"),
           "Whether, beyond that, their memory is the same at the places that are looked at.");
  m.def("content", &content, py::arg("tensor"),
        "A hash of all values of a contiguous tensor on the CPU; None for other tensors.");
  m.def("sample_size", &sample_size, py::arg("tensor"),
        "How many elements of the tensor a Snapshot looks at.");
  py::class_<Gather>(
      m, "Gather", "inputs[i] = arguments[order[i]], or what references[-1 - order[i]] refers to.")
      .def(py::init<std::vector<int64_t>>(), py::arg("order"))
      .def("__call__", &Gather::operator(), py::arg("arguments"), py::arg("references"),
           "A tuple, or None if a referent is dead.");
}

}  // namespace qfx
