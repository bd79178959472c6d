// qfx._C: the state of tensors, by which a write to one is noticed.
#include <algorithm>
#include <optional>

#include "python/fingerprint.h"
#include "python/parts.h"
#include "python/tensor_address.h"

namespace qfx::python {
namespace {

// The referent of a weak reference, null if it is dead.
Object referent(const Object& reference) {
  PyObject* object = PyWeakref_GetObject(reference.get());
  if (object == nullptr) throw Raised();
  return object == Py_None ? Object() : Object::shared(object);
}

// How a tensor is read: by Python's own protocol, whose meaning every torch keeps. Reading torch's
// C++ objects would tie this library to the layout that one torch version gives them.
class Reader {
 public:
  Reader() {
    const Object torch = imported("torch"), tensor = attribute(torch.get(), "Tensor");
    version_ = attribute(tensor.get(), "_version");
    get_version_ =
        reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(version_.get()), Py_tp_descr_get));
    storage_ = attribute(tensor.get(), "untyped_storage");
    strided_ = attribute(torch.get(), "strided");
  }

  uintptr_t address(PyObject* tensor) const { return address_(tensor); }

  int64_t version(PyObject* tensor) const {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    return integer_of(Object::taken(get_version_(version_.get(), tensor, type)).get());
  }
  // None for what was made in inference mode: reading the version of that is a RuntimeError.
  std::optional<int64_t> version_if_counted(PyObject* tensor) const {
    try {
      return version(tensor);
    } catch (const Raised&) {
      if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw;
      PyErr_Clear();
      return std::nullopt;
    }
  }

  // The elements of a tensor in the memory of the CPU; nothing of another.
  Region region(PyObject* tensor) const {
    const Object device = attribute(tensor, "device");
    const bool here = text_of(attribute(device.get(), "type").get()) == "cpu" &&
                      attribute(tensor, "layout").get() == strided_.get();
    if (!here) return {};
    return {address(tensor), integers_of(attribute(tensor, "shape").get()),
            integers_of(called(attribute(tensor, "stride").get()).get()),
            integer_of(called(attribute(tensor, "element_size").get()).get())};
  }

  // The Python object of the storage: the same one as long as the storage lives.
  Object storage(PyObject* tensor) const { return called(storage_.get(), tensor); }

 private:
  Object version_, storage_, strided_;
  descrgetfunc get_version_ = nullptr;
  TensorAddress address_;
};

const char* c_data(PyObject* object) {
  return reinterpret_cast<const char*>(integer_of(attribute(object, "_cdata").get()));
}

// The weights of one call: arguments[p] for p in `positions`. It keeps no tensor or storage alive.
class Snapshot {
 public:
  Snapshot(PyObject* arguments, const std::vector<int64_t>& positions) {
    for (int64_t position : positions) {
      const Object weight = Object::taken(PySequence_GetItem(arguments, position));
      const Object storage = reader_.storage(weight.get());
      const Sample sample(reader_.region(weight.get()));
      stamps_.push_back({position, weight.get(), reader_.address(weight.get()),
                         reader_.version_if_counted(weight.get()),
                         Object::taken(PyWeakref_NewRef(storage.get(), nullptr)), sample,
                         sample.hash()});
      for (PyObject* object : {weight.get(), storage.get()}) {
        read_.push_back(reinterpret_cast<const char*>(object));
        read_.push_back(c_data(object));
      }
    }
  }

  // Same tensors, with the same storages, addresses and versions.
  bool same_tensors(PyObject* arguments) const {
    const Py_ssize_t count = PyTuple_Size(arguments);
    return std::all_of(stamps_.begin(), stamps_.end(), [&](const Stamp& stamp) {
      return stamp.position < count && same(stamp, PyTuple_GetItem(arguments, stamp.position));
    });
  }

  // The same tensors, and the same bytes where one looks. Weights that other memory has displaced
  // from the caches are fetched all at once.
  bool unchanged(PyObject* arguments) const {
    for (const char* object : read_) {
      __builtin_prefetch(object);
      __builtin_prefetch(object + Sample::kLine);
    }
    for (const Stamp& stamp : stamps_) stamp.sample.prefetch();
    if (!same_tensors(arguments)) return false;  // and with them the memory of the samples
    return std::all_of(stamps_.begin(), stamps_.end(),
                       [](const Stamp& stamp) { return stamp.sample.hash() == stamp.hash; });
  }

 private:
  struct Stamp {
    int64_t position;
    const PyObject* tensor;  // only compared: the tensor may be dead
    uintptr_t address;
    std::optional<int64_t> version;
    Object storage;  // weak, so that no later storage is taken for this one
    Sample sample;
    uint64_t hash;
  };

  bool same(const Stamp& stamp, PyObject* weight) const {
    return weight == stamp.tensor && reader_.address(weight) == stamp.address &&
           (!stamp.version || reader_.version(weight) == *stamp.version) &&
           reader_.storage(weight).get() == referent(stamp.storage).get();
  }

  Reader reader_;
  std::vector<Stamp> stamps_;
  std::vector<const char*> read_;  // where what the stamps are compared with was, to be prefetched
};

Snapshot* make_snapshot(PyObject* args, PyObject* named) {
  PyObject *arguments = nullptr, *positions = nullptr;
  read_arguments(args, named, "O!O:Snapshot", {"arguments", "positions"}, &PyTuple_Type, &arguments,
                 &positions);
  return new Snapshot(arguments, integers_of(positions));
}

PyObject* tuple_in(PyObject* args, PyObject* named, const char* format) {
  PyObject* arguments = nullptr;
  read_arguments(args, named, format, {"arguments"}, &PyTuple_Type, &arguments);
  return arguments;
}

Object same_tensors(PyObject* self, PyObject* args, PyObject* named) {
  return object_of(held<Snapshot>(self).same_tensors(tuple_in(args, named, "O!:same_tensors")));
}

Object unchanged(PyObject* self, PyObject* args, PyObject* named) {
  return object_of(held<Snapshot>(self).unchanged(tuple_in(args, named, "O!:unchanged")));
}

using Order = std::vector<int64_t>;

Order* make_gather(PyObject* args, PyObject* named) {
  PyObject* order = nullptr;
  read_arguments(args, named, "O:Gather", {"order"}, &order);
  return new Order(integers_of(order));
}

// inputs[i] = arguments[order[i]], or the referent of references[-1 - order[i]] where that is
// negative. None if a referent is dead.
Object gather(PyObject* self, PyObject* args, PyObject* named) {
  PyObject *arguments = nullptr, *references = nullptr;
  read_arguments(args, named, "O!O!:Gather", {"arguments", "references"}, &PyTuple_Type, &arguments,
                 &PyTuple_Type, &references);
  const Order& order = held<Order>(self);
  Object inputs = Object::taken(PyTuple_New(static_cast<Py_ssize_t>(order.size())));
  for (size_t i = 0; i < order.size(); ++i) {
    const bool weak = order[i] < 0;
    PyObject* item =
        weak ? PyTuple_GetItem(references, -1 - order[i]) : PyTuple_GetItem(arguments, order[i]);
    if (item == nullptr) throw Raised();
    Object input = weak ? referent(Object::shared(item)) : Object::shared(item);
    if (!input) return none();
    PyTuple_SetItem(inputs.get(), static_cast<Py_ssize_t>(i), input.release());
  }
  return inputs;
}

Object content(PyObject*, PyObject* args, PyObject* named) {
  PyObject* tensor = nullptr;
  read_arguments(args, named, "O:content", {"tensor"}, &tensor);
  const Region region = Reader().region(tensor);
  if (region.element == 0) return none();
  if (PyObject_IsTrue(called(attribute(tensor, "is_contiguous").get()).get()) == 0) return none();
  const int64_t count = integer_of(called(attribute(tensor, "numel").get()).get());
  const auto bytes = static_cast<size_t>(count * region.element);
  uint64_t hash = 0;
  {
    const Unlocked unlocked;
    hash = hash_bytes(reinterpret_cast<const char*>(region.address), bytes);
  }
  return object_of(hash);
}

Object sample_size(PyObject*, PyObject* args, PyObject* named) {
  PyObject* tensor = nullptr;
  read_arguments(args, named, "O:sample_size", {"tensor"}, &tensor);
  const Region region = Reader().region(tensor);
  return object_of(region.element == 0 ? int64_t{0} : Sample(region).bytes() / region.element);
}

PyMethodDef functions[] = {
    method<content>(
        "content",
        "content(tensor)\n--\n\nA hash of all values of a contiguous tensor on the CPU; None for "
        "other tensors."),
    method<sample_size>(
        "sample_size",
        "sample_size(tensor)\n--\n\nHow many elements of the tensor a Snapshot looks at."),
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef methods[] = {
    method<same_tensors>("same_tensors",
                         "same_tensors(arguments)\n--\n\nWhether these are the same tensors, with "
                         "the same storages, "
                         "addresses and versions."),
    method<unchanged>(
        "unchanged",
        "unchanged(arguments)\n--\n\nWhether, beyond that, their memory is the same at the places "
        "that are looked at."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_stamps(PyObject* module) {
  add_functions(module, functions);
  add_class<Snapshot, make_snapshot>(module, "Snapshot",
                                     "The state of arguments[p], p in positions: tensors.",
                                     {{Py_tp_methods, methods}});
  add_class<Order, make_gather>(module, "Gather",
                                "inputs[i] = arguments[order[i]], or what references[-1 - "
                                "order[i]] refers to. A call returns "
                                "a tuple, or None if a referent is dead.",
                                {{Py_tp_call, reinterpret_cast<void*>(&entry<gather>)}});
}

}  // namespace qfx::python
