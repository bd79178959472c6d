"""Defects of packed weights: the cache, and what tells that a weight has changed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CACHING = (
    Mutant(
        "a step of an optimizer is not noticed",
        old="    register_optimizer_step_post_hook(stepped)",
        new="    pass",
        tests=("test_a_fused_step_on_one_element_is_seen",),
    ),
    Mutant(
        "a write to a weight is not noticed",
        old="return any(known.unchanged((weight,)) for known in self._known)",
        new="return bool(self._known)",
        tests=("test_change_is_seen",),
    ),
    Mutant(
        "invalidate does not reach the wrapper",
        old="if found is None or not found.current:",
        new="if found is None:",
        tests=("test_the_cache_is_asked_after_an_invalidation",),
    ),
    Mutant(
        "a refreshed pack is compared with the content of the one before",
        old="            entry.content = content\n",
        new="",
        tests=("test_a_weight_is_packed_again_once_if_its_content_has_changed",),
    ),
    Mutant(
        "the strides of a weight are not in the cache's key",
        old="*where, tensor.shape, tensor.stride(), tensor.dtype)",
        new="*where, tensor.shape, (), tensor.dtype)",
        tests=("test_a_parameter_and_its_transpose_in_one_memory_are_two_weights",),
    ),
    Mutant(
        "the packing of a weight is not in the cache's key",
        old="(*_in_storage(weight), view, packing)",
        new="(*_in_storage(weight), view)",
        tests=("test_recipes_have_their_own_packed_weights_which_follow_the_weight",),
    ),
    Mutant(
        "an optimizer marks the weights that it does not train",
        old="act(p for p in parameters if p.requires_grad or p.grad is not None)",
        new="act(parameters)",
        tests=("test_the_frozen_base_of_adapters_is_packed_once",),
    ),
    Mutant(
        "a module's pack outlives an optimizer's step",
        old="if before is None or self._epoch != epoch or not",
        new="if before is None or not",
        tests=("test_never_stale",),
    ),
    Mutant(
        "a copied module has the pack of its original",
        old="def __reduce__(self) -> Any:\n        return Memo, ()",
        new="def reduce(self) -> Any:\n        return Memo, ()",
        tests=("test_copies_and_pickles_start_empty",),
    ),
    Mutant(
        "a new wrapper trusts the packs of the cache",
        old="if before is None or before.written_unseen(arguments):",
        new="if before is not None and before.written_unseen(arguments):",
        tests=("test_a_new_compilation_trusts_no_pack",),
    ),
    Mutant(
        "a write that is seen says nothing of other weights",
        old="if before is None or before.written_unseen(arguments):",
        new="if before is None:",
        tests=("test_one_seen_write_makes_a_call_compare_all_weights",),
    ),
    Mutant(
        "tensors that share memory stay known when it is packed anew",
        old="            entry.forget()  # the other tensors that share this memory\n",
        new="",
        tests=("test_no_parameter_is_known_when_another_has_its_memory_packed_anew",),
    ),
    Mutant(
        "a refreshed pack is elsewhere",
        old="old.copy_(new)",
        new="old.data = new",
        tests=("test_packed_buffers_keep_their_address",),
    ),
    Mutant(
        "packs outlive their weights",
        old="if ref.expired()]:",
        new="if not ref]:",
        tests=("test_dead_weights_are_forgotten",),
    ),
    Mutant(
        "sets of weights that died are kept",
        old="if not k.dead}",
        new="if k}",
        tests=("test_sets_of_weights_that_died_are_forgotten",),
    ),
    Mutant(
        "calls that find a buffer rewritten are not counted",
        old="return Counter({i: counts[i] + 1 for i",
        new="return Counter({i: 1 for i",
        tests=("test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph",),
    ),
    Mutant(
        "parameters that change are packed at every call",
        old="for i in fresh if not isinstance(arguments[i], nn.Parameter)})",
        new="for i in fresh})",
        tests=("test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph",),
    ),
    Mutant(
        "packing at every call has no price",
        old="more = cost.packing(work)",
        new="more = 0.0",
        tests=("test_packing_at_every_call_has_its_price",),
    ),
    Mutant(
        "torch._dynamo.reset() leaves what is known of rewritten buffers",
        old="    _REWRITTEN.clear()",
        new="    pass",
        tests=("test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph",),
    ),
)
