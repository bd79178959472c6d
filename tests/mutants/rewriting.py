"""Defects of the rewrite: canonical form, shared codes, packing, fusion, the wrapper."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REWRITING = (
    Mutant(
        "an activation is applied before the outliers are added, and again",
        old='made = _int8(site, nodes, codes, (bias, "none", torch.float32))',
        new="made = _int8(site, nodes, codes, (bias, site.activation, torch.float32))",
        tests=("test_the_activation_of_a_split_site_sees_the_sum",),
    ),
    Mutant(
        "outliers count twice, in float and in int8",
        old="kept[column] = 0.0",
        new="kept[column] = 1.0",
        tests=("test_forms_have_the_same_bits_within_the_bound",),
    ),
    Mutant(
        "outliers of the weight widen its scale",
        old="w_nk = aten.index_fill.int_Scalar(w_nk, 1, outliers, 0.0)",
        new="w_nk = aten.clone.default(w_nk)",
        tests=("test_codes_are_those_of_the_transformed_weight",),
    ),
    Mutant(
        "a bias behind its matmul is read before it is there",
        old="> inputs.position[site.node]:",
        new="< inputs.position[site.node]:",
        tests=("test_constant_bias_after_the_matmul_in_graph_order",),
    ),
    Mutant(
        "activations have 8 bits, whatever their scheme says",
        old="return list(Code(spec.bits, int(spec.symmetric), per_tensor, spec.group, rotation))",
        new="return list(Code(8, int(spec.symmetric), per_tensor, spec.group, rotation))",
        tests=("test_activations_are_quantized_as_the_scheme_says",),
    ),
    Mutant(
        "a weight per column is quantized per row in the backward",
        old="w.bits, int(w.axes in (PER_TENSOR, PER_COLUMN))]",
        new="w.bits, 0]",
        tests=("test_the_gradient_of_x_is_that_of_the_packed_weight",),
    ),
    Mutant(
        "codes are shared across a write",
        old="if not any(there < i < here for i in self.write_positions):",
        new="if not any(there < i < there for i in self.write_positions):",
        tests=("test_a_write_between_two_consumers_is_respected",),
    ),
    Mutant(
        "codes are shared by other views of their input",
        old="key = (site.x, site.x_view, what)",
        new="key = (site.x, what)",
        tests=("test_codes_are_not_shared_by_two_views_of_an_activation",),
    ),
    Mutant(
        "codes are shared by other static scales",
        old="(turn, spec, nodes.scale, nodes.zero_point), make)",
        new="(turn, spec), make)",
        tests=("test_codes_are_shared_where_static_scales_are_equal",),
    ),
    Mutant(
        "codes are shared by other factors",
        old="        turn = (nodes.factor, nodes.rotation)\n",
        new="        turn = (None, nodes.rotation)\n",
        tests=("test_codes_are_shared_where_factors_are_equal",),
    ),
    Mutant(
        "two views of a weight are packed as one",
        old="if key not in made:\n            made[key] = make(site,",
        new="if (key := (site.weight, packing)) not in made:\n            made[key] = make(site,",
        tests=("test_inference[opened]", "test_each_operation"),
    ),
    Mutant(
        "a weight that trains is packed before the steps",
        old="return inputs and not site.weight_trains and not site.repacked",
        new="return inputs and not site.repacked",
        tests=("test_steps_through_data_are_seen_as_nothing_is_packed_between_them",),
    ),
    Mutant(
        "a graph rewritten for training keeps no float weight",
        old="return held and not site.weight_trains",
        new="return held",
        tests=("test_a_graph_rewritten_for_training_has_the_same_bits",),
    ),
    Mutant(
        "fc.1 takes the packed weight of fc_1",
        old="        name = _free_name(gm, name)\n",
        new="",
        tests=("test_names_that_differ_by_a_dot_only",),
    ),
    Mutant(
        "per-tensor weights do not share one scale",
        old="per_tensor = spec.axes in (PER_TENSOR, PER_COLUMN)  # (R2)",
        new="per_tensor = spec.axes == PER_COLUMN",
        tests=("test_codes_are_those_of_the_transformed_weight",),
    ),
    Mutant(
        "weights per column share no scale",
        old="per_tensor = spec.axes in (PER_TENSOR, PER_COLUMN)  # (R2)",
        new="per_tensor = spec.axes == PER_TENSOR",
        tests=("test_codes_are_those_of_the_transformed_weight",),
    ),
    Mutant(
        "factors of columns are for 8 bits, whatever the weight has",
        old="torch.div(largest, code_range(bits, True)[1])",
        new="torch.div(largest, 127)",
        tests=("test_codes_are_those_of_the_transformed_weight",),
    ),
    Mutant(
        "the groups of a weight are symmetric although it is not",
        old="triple = ops.quantize.default(rows, list(Code(spec.bits, int(spec.symmetric))))",
        new="triple = ops.quantize.default(rows, list(Code(spec.bits)))",
        tests=("test_codes_are_those_of_the_transformed_weight",),
    ),
    Mutant(
        "a packed weight has 8 bits, whatever its scheme says",
        old="code = Code(spec.bits, int(spec.symmetric), int(per_tensor), 0, rotation)",
        new="code = Code(8, int(spec.symmetric), int(per_tensor), 0, rotation)",
        tests=("test_codes_are_those_of_the_transformed_weight",),
    ),
    Mutant(
        "the guard's beta forgets what rotation rounds",
        old=" + _norms(wanted) * roundings",
        new="",
        tests=("test_alpha_and_beta_without_a_factor_are_those_of_the_codes",),
    ),
    Mutant(
        "a static quantization that rotates is fused",
        old='return "what reads its codes transforms them" if turned else None',
        new="return None",
        tests=("test_what_is_done_to_floats_between_is_done",),
    ),
    Mutant(
        "a half result that becomes codes is not rounded on the way",
        old="(_products_are_read, _floats_are_read, _is_cast, _is_turned)",
        new="(_products_are_read, _floats_are_read, _is_turned)",
        tests=("test_what_is_done_to_floats_between_is_done",),
    ),
    Mutant(
        "an activation that three sites share is quantized three times",
        old="if readers == 1 or (",
        new="if readers >= 1 or (",
        tests=("test_one_quantize_node_for_q_k_v_and_for_gate_up",),
    ),
    Mutant(
        "on a GPU faulty rows keep their codes",
        old="return _where(finite, aten.to.dtype(aten.clamp.default(q, qmin, qmax), torch.int8))",
        new="return aten.to.dtype(aten.clamp.default(q, qmin, qmax), torch.int8)",
        tests=("test_inlined_quantize_is_quantize",),
    ),
    Mutant(
        "on a GPU a static scale of zero divides",
        old="used = aten.clamp_min.default(scale, SMALLEST_SCALE)",
        new="used = scale",
        tests=("test_inlined_quantize_by_a_scale_is_quantize",),
    ),
    Mutant(
        "the parts of packed weights are counted by weights",
        old="else -1 - before[i.source] - i.part",
        new="else -1 - i.source - i.part",
        tests=("test_the_order_is_what_gather_of_a_feed_does",),
    ),
    Mutant(
        "gradients are not recorded below autograd",
        old="        if torch.is_grad_enabled():\n            return compiled(*arguments)",
        new="        if not torch.is_grad_enabled():\n            return compiled(*arguments)",
        tests=("test_inference_enters_no_autograd_kernel",),
    ),
    Mutant(
        "after a fault the half edited graph runs",
        old="return inner(clone(gm), example_inputs)",
        new="return inner(copy, example_inputs)",
        tests=("test_a_fault_of_the_pass_leaves_the_graph_float",),
    ),
    Mutant(
        "a layer runs with the recipe of another",
        old="if config.recipe is not None or config.guard is not None:",
        new="if config.guard is not None:",
        tests=("test_each_layer_has_the_numbers_of_its_own_recipe",),
    ),
    Mutant(
        "the keys of PyTorch's caches do not know the kernels",
        old='[*sorted(Path(__file__).parents[1].rglob("*.py")), Path(_C.__file__)]',
        new='sorted(Path(__file__).parents[1].rglob("*.py"))',
        tests=("test_the_digest_covers_sources_and_kernels",),
    ),
    Mutant(
        "operators of other libraries are believed about sizes",
        old='return bool({str(t).partition(".")[0] for t in operators} - known)',
        new="return False",
        tests=("test_sizes_are_checked_where_other_libraries_promise_them",),
    ),
    Mutant(
        "tangents pass through compiled code unseen",
        old="            _refuse_tangents(arguments)\n",
        new="            pass\n",
        tests=("test_forward_mode_tangents_are_an_error",),
    ),
)
