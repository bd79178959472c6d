"""Defects of modules and functions for users."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODULES = (
    Mutant(
        "a module passes gradients of what a static scale clips",
        old="inside = (scaled + zero >= limits[0]) & (scaled + zero <= limits[1])",
        new="inside = scaled + zero >= limits[0]",
        tests=("test_gradients_reach_input_and_bias",),
    ),
    Mutant(
        "a module's factor is forgotten without a rotation",
        old="    turned = frozen.factor is not None or how.scheme.rotation != 0\n",
        new="    turned = how.scheme.rotation != 0\n",
        tests=("test_a_factor_without_a_rotation_counts_in_every_form",),
    ),
    Mutant(
        "a module's weight is packed without its factor",
        old="packing = Packing(scheme.w, factor, scheme.rotation,",
        new="packing = Packing(scheme.w, None, scheme.rotation,",
        tests=("test_weight_is_within_a_step", "test_a_recipe_decides"),
    ),
    Mutant(
        "half() rounds the scales of a module",
        old="return t.to(made.device) if id(t) in ids and made.dtype != t.dtype else made",
        new="return made",
        tests=("test_half_types",),
    ),
    Mutant(
        "codes of another shape are loaded",
        old="if value.dtype not in dtypes or value.shape != tuple(shape) or",
        new="if value.dtype not in dtypes or",
        tests=("test_the_error_says_what_is_wrong",),
    ),
    Mutant(
        "what an operator writes to the floats of a weight is not stored",
        old="        tensor.write(floats[id(tensor)])",
        new="        del tensor",
        tests=("test_what_is_written_is_there",),
    ),
    Mutant(
        "floats are written to the codes of a state dict",
        old="of.is_floating_point() and not to.is_floating_point()",
        new="of.is_floating_point() and to.is_complex()",
        tests=("test_the_state_dict_can_be_written_and_takes_no_floats_for_codes",),
    ),
    Mutant(
        "the float weight of a Conv1D is taken as that of a linear",
        old="return weight.t() if turned else weight",
        new="return weight",
        tests=("test_a_float_checkpoint_of_square_weights_is_turned",),
    ),
    Mutant(
        "a loaded weight forgets its groups",
        old="packed_values(values, found.scheme.w, found.scheme.group)",
        new="packed_values(values, found.scheme.w, 0)",
        tests=("test_state_dict_round_trip[xs8r_ws4g64]",),
    ),
    Mutant(
        "a functional linear quantizes its weight per row, whatever its axes",
        old="w_q, w_scale, _ = ops.quantize(weight.detach(), code_of(scheme.w))",
        new="w_q, w_scale, _ = ops.quantize(weight.detach(), code_of(QSpec(scheme.w.bits)))",
        tests=("test_a_functional_linear_is_that_of_its_codes",),
    ),
    Mutant(
        "a functional linear's gradient is of a weight quantized per row",
        old="weight.detach(), list(spec.axes), spec.bits, True, grad.dtype)",
        new="weight.detach(), [1], spec.bits, True, grad.dtype)",
        tests=("test_a_functional_linear_is_that_of_its_codes",),
    ),
    Mutant(
        "the gradient of a learned step is not scaled",
        old="return step.detach() + (step - step.detach()) * factor",
        new="return step.detach() + (step - step.detach())",
        tests=("test_the_gradient_of_a_step_is_scaled_by_what_shares_it",),
    ),
    Mutant(
        "the largest step is never the best",
        old="for i in range(1, 65):",
        new="for i in range(1, 64):",
        tests=("test_the_best_step_is_no_worse_than_any_fraction_of_the_largest",),
    ),
    Mutant(
        "a step that a whole weight shares is scaled as that of a row",
        old="shared = n * k if self.scheme.w.axes == PER_TENSOR else k",
        new="shared = k",
        tests=("test_the_gradient_of_a_step_is_scaled_by_what_shares_it",),
    ),
    Mutant(
        "a new step leaves the packed weight as it was",
        old="(self.weight, self.w_log_step),",
        new="(self.weight,),",
        tests=("test_a_new_step_packs_again",),
    ),
    Mutant(
        "the shift of activations is lost",
        old="return x + shift.to(x.dtype)",
        new="return x + shift.detach().to(x.dtype)",
        tests=("test_shift_gets_the_column_sum_of_dx",),
    ),
    Mutant(
        "a converted module keeps the very shift that trained",
        old="module.shift.detach().float().clone()",
        new="module.shift.float()",
        tests=("test_no_float_weight_and_no_step_is_kept",),
    ),
    Mutant(
        "a state without a shift is refused",
        old='    if fields["shift"]:\n        found["shift"] = (torch.float32, (k,))',
        new='    found["shift"] = (torch.float32, (k,))',
        tests=("test_round_trips_of_the_state",),
    ),
    Mutant(
        "steps that were never fitted are served",
        old="if step.isnan().any():",
        new="if False:",
        tests=("test_half_trained_modules_are_refused_and_nothing_is_changed",),
    ),
    Mutant(
        "binary weights beyond the clip get gradients",
        old=" * x_scale * (weight.abs() <= CLIP)",
        new=" * x_scale",
        tests=("test_weights_beyond_the_clip_get_no_gradient",),
    ),
    Mutant(
        "a binary weight has a scale for each row, whatever its axes",
        old="mean = size.mean(1) if axes == PER_ROW else size.mean().expand(weight.shape[0])",
        new="mean = size.mean(1)",
        tests=("test_output_is_the_exact_sum_of_signs_scaled",),
    ),
    Mutant(
        "binary activations get gradients where they are clipped",
        old="dx = dx_hat * (x_mk.abs() <= x_scale)",
        new="dx = dx_hat * (x_mk.abs() >= x_scale)",
        tests=("test_gradients_equal_the_oracle[nn_binary]",),
    ),
    Mutant(
        "quantize_ ignores skip",
        old="if out := left_out(config, [name]):",
        new="if out := left_out(Config(), [name]):",
        tests=("test_patterns[nn_linear]",),
    ),
    Mutant(
        "torch's encoders read past the modules",
        old="module.activation_relu_or_gelu = 0",
        new="pass",
        tests=("test_encoders_of_torch_do_not_read_past_the_modules",),
    ),
    Mutant(
        "a shared module is replaced under one of its names",
        old="modules = model.named_modules(remove_duplicate=False)",
        new="modules = model.named_modules()",
        tests=("test_a_module_with_two_names_stays_one",),
    ),
    Mutant(
        "modules that did not run are forgotten",
        old="        missed.discard(linear)\n",
        new="        missed.clear()\n",
        tests=("test_errors[test_nn.py]",),
    ),
    Mutant(
        "columns come back in the order of rows",
        old="return rows.t().reshape(like.shape)",
        new="return rows.reshape(like.shape)",
        tests=(
            "test_each_part_is_quantized_by_the_definition",
            "test_error_is_at_most_half_a_step",
        ),
    ),
    Mutant(
        "quantize takes a zero point that it then ignores",
        old="or (zero_point is not None and not spec.static):",
        new=":",
        tests=("test_errors[test_functions.py]",),
    ),
    Mutant(
        "codes of an embedding are read without their sign",
        old="return (unsigned.to(torch.float32) - _ZERO) * scale",
        new="return unsigned.to(torch.float32) * scale",
        tests=("test_an_element_is_off_by_half_a_step_at_most",),
    ),
    Mutant(
        "half() rounds the scales of an embedding",
        old="super()._apply(casting_all_but((self.packed, self.scale), fn), recurse)",
        new="super()._apply(casting_all_but((self.packed,), fn), recurse)",
        tests=("test_casting_changes_what_it_gives_alone",),
    ),
    Mutant(
        "an embedding that writes to its rows becomes codes",
        old="    if module.max_norm is not None:\n",
        new="    if module.max_norm == 0:\n",
        tests=("test_it_stays_float_and_the_reason_is_said",),
    ),
    Mutant(
        "the scale of an embedding is forgotten",
        old="        if number is None:\n            return rows\n",
        new="        if rows is not None:\n            return rows\n",
        tests=("test_the_scale_of_an_embedding_multiplies_its_rows",),
    ),
    Mutant(
        "int8 embeddings count as weights that multiply",
        old="codes += 0 if isinstance(module, nn.Embedding) else count",
        new="codes += count",
        tests=("test_a_tied_model_has_two_tables_of_codes",),
    ),
    Mutant(
        "rows of a loaded embedding are of the file's type",
        old="            return module.to(linear.weight.dtype)\n",
        new="            return module\n",
        tests=("test_transformers_saves_and_loads_it",),
    ),
    Mutant(
        "programs do not convert the codes of an embedding",
        old="(torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.float16)",
        new="(torch.int64, torch.bool, torch.bfloat16, torch.float16)",
        tests=("test_a_step_is_one_program",),
    ),
)
