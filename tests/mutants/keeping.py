"""Defects of what is kept: files, tables of times, state dicts, what a linear had."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEEPING = (
    Mutant(
        "a file is written in place",
        old="            partial.write(write)\n            partial.move(target, like)\n",
        new="            with target.open('wb') as file:\n                write(file)\n"
        "            shutil.copy(target, partial.path)\n            partial.move(target, like)\n",
        tests=(
            "test_a_full_disk_leaves_the_earlier_file",
            "test_a_failure_at_the_end_leaves_the_earlier_file",
        ),
    ),
    Mutant(
        "a file that is written anew loses its permissions",
        old="            shutil.copymode(like, self.path)\n",
        new="            pass\n",
        tests=("test_permissions_stay_and_links_are_followed",),
    ),
    Mutant(
        "a link is replaced, not what it points to",
        old="        target = Path(os.path.realpath(path))\n",
        new="        target = Path(path)\n",
        tests=("test_permissions_stay_and_links_are_followed",),
    ),
    Mutant(
        "a table is read that others may write",
        old="if not own or about.st_mode & _OTHERS:",
        new="if not own:",
        tests=("test_what_another_user_could_have_written_is_not_read",),
    ),
    Mutant(
        "a table of another user is read",
        old="stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()",
        new="stat.S_ISREG(about.st_mode)",
        tests=("test_a_file_that_could_be_anothers_is_not_read_and_is_replaced",),
    ),
    Mutant(
        "a table is written to where a link leads",
        old="os.replace(partial, key, src_dir_fd=folder, dst_dir_fd=folder)",
        new="os.replace(partial, os.path.realpath(self.folder / key), src_dir_fd=folder)",
        tests=("test_a_link_is_not_written_through",),
    ),
    Mutant(
        "the newest tables go",
        old="sorted(kept)[: -self.most]",
        new="sorted(kept)[self.most :]",
        tests=("test_what_was_not_of_use_for_longest_goes",),
    ),
    Mutant(
        "a folder that others may write to is used",
        old="            if about.st_mode & _OTHERS:\n                mode",
        new="            if False:\n                mode",
        tests=("test_a_folder_that_others_can_write_to_is_refused",),
    ),
    Mutant(
        "a kept time that is no number is believed",
        old="if type(raw) not in (int, float) or not least <= raw <= most:",
        new="if type(raw) not in (int, float) or raw < least or raw > most:",
        tests=("test_a_number_that_is_no_time_is_refused",),
    ),
    Mutant(
        "codes are loaded under the scheme that the module had",
        old="same = self.scheme == other.scheme and self.shape == other.shape",
        new="same = self.shape == other.shape",
        tests=(
            "test_what_is_computed_or_shared_is_loaded_with_a_word",
            "test_any_module_takes_the_scheme_of_the_file",
        ),
    ),
    Mutant(
        "codes below the scheme's range are loaded",
        old="if low < least or high > most:",
        new="if high > most:",
        tests=("test_the_error_says_what_is_wrong",),
    ),
    Mutant(
        "scales that are not positive are loaded",
        old='_check_all(value, name, (value > 0) & value.isfinite(), "finite and positive")',
        new='_check_all(value, name, value.isfinite(), "finite and positive")',
        tests=("test_the_error_says_what_is_wrong",),
    ),
    Mutant(
        "what the scheme needs may be missing",
        old="if (name in given) != (name in wanted):",
        new="if name in given and name not in wanted:",
        tests=(
            "test_one_change_gives_what_the_file_says_or_an_error",
            "test_the_error_says_what_is_wrong",
        ),
    ),
    Mutant(
        "a format of later is read",
        old="if numbers and numbers[0] != FORMAT:",
        new="if numbers and numbers[0] < FORMAT:",
        tests=("test_the_error_says_what_is_wrong",),
    ),
    Mutant(
        "what a later scheme says is not looked at",
        old="        if number:\n",
        new="        if number < 0:\n",
        tests=(
            "test_the_error_says_what_is_wrong",
            "test_one_change_gives_what_the_file_says_or_an_error",
        ),
    ),
    Mutant(
        "a module's scheme is taken by another kind of module",
        old='    if found["module"] != module:',
        new='    if not found["module"]:',
        tests=(
            "test_the_error_says_what_is_wrong",
            "test_trained_modules_load_what_was_trained_alike",
        ),
    ),
    Mutant(
        "steps that were trained under another scheme are loaded",
        old="if there[name] != here[name]]",
        new="if name not in here]",
        tests=("test_trained_modules_load_what_was_trained_alike",),
    ),
    Mutant(
        "a refused state dict leaves half a model loaded",
        old="        module.register_load_state_dict_pre_hook(check)\n",
        new="        pass\n",
        tests=("test_a_refused_state_dict_leaves_the_whole_model",),
    ),
    Mutant(
        "loaded scales are the file's own memory",
        old="return given.detach().to(device, copy=True)",
        new="return given.detach().to(device)",
        tests=("test_what_is_loaded_is_a_copy_unless_assigned",),
    ),
    Mutant(
        "the hooks of a linear are dropped",
        old="    for name in CALL_HOOKS:",
        new="    for name in CALL_HOOKS[3:]:",
        tests=(
            "test_hooks_go_over_in_order_and_their_handles_remove_them",
            "test_hooks_that_went_over_are_compiled",
        ),
    ),
    Mutant(
        "hidden buffers of a linear are saved",
        old="    to._non_persistent_buffers_set |= of._non_persistent_buffers_set\n",
        new="",
        tests=("test_attributes_tensors_and_children_go_over",),
    ),
    Mutant(
        "hooks on a state dict are lost without a word",
        old="getattr(module, name).values() for name in STATE_HOOKS",
        new="getattr(module, name).values() for name in ()",
        tests=("test_obstacles_are_refused_by_name_and_nothing_is_changed",),
    ),
    Mutant(
        "the digest of a saved file is not compared",
        old="if file and digest.hexdigest() != file.sha256:",
        new="if file and not digest.hexdigest():",
        tests=("test_any_change_of_the_tensors_is_refused",),
    ),
    Mutant(
        "codes lie beside what is made of them until all are read",
        old="        del tensor\n    return made, rest",
        new="        rest.setdefault('', []).append(tensor)\n    rest.pop('', 0)\n"
        "    return made, rest",
        tests=("test_the_peak_is_little_more_than_the_file",),
    ),
    Mutant(
        "a saved tie is lost",
        old="in _tied(skeleton, plan):\n",
        new="in ():\n",
        tests=("test_a_model_comes_back",),
    ),
    Mutant(
        "a model of another is removed",
        old="        if MARK in table_of(path).metadata:\n",
        new="        if table_of(path).entries:\n",
        tests=("test_an_earlier_model_is_replaced_and_no_file_of_another",),
    ),
    Mutant(
        "buffers outside of the state dict are not saved",
        old="    everything = {**state, **derived}\n",
        new="    everything = {**state}\n    derived = {}\n",
        tests=("test_a_model_comes_back",),
    ),
    Mutant(
        "models of transformers are saved without what stops a loader that lacks qfx",
        old='        state[f"{name}.{MARK}"] =',
        new="        _ =",
        tests=("test_without_qfx_hf_loading_is_an_error_and_not_random_weights",),
    ),
    Mutant(
        "what no file has is taken for loaded",
        old='return isinstance(tensor, Tensor) and getattr(tensor, "_is_hf_initialized", False)',
        new="return isinstance(tensor, Tensor)",
        tests=("test_a_damaged_folder_is_refused",),
    ),
    Mutant(
        "tied weights are quantized before they are there",
        old='self.later = {m for name, m in names if f"{name}.weight" in tied}',
        new="self.later = {m for name, m in names if not tied}",
        tests=("test_loading_quantizes_and_saving_brings_it_back",),
    ),
)
