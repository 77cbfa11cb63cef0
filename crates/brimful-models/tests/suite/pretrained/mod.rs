//! Folders written by `transformers`, with its results: loaded, trained, saved and trained further.
//!
//! `tests/pretrained/make_reference.py` wrote them; `peers` compares with `transformers` and PEFT at test time.

mod peers;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use brimful::layers::Model;
use brimful::nn::Lora;
use brimful::optim::{Optimizer, Sgd};
use brimful::pipeline::{Builder, Offload};
use brimful::schedule::Schedule;
use brimful::{Layers, Loss, MicroBatcher, MicroBatches, Pipeline, device, save};
use brimful_models::KeyValueCache;
use brimful_models::pretrained::{AdapterFolder, Config, Pretrained, PretrainedError};
use serde_json::{Map, Value, json};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

const FOLDERS: [&str; 7] =
    ["gpt2", "gpt2_untied", "llama", "llama_grouped", "llama_biased", "mistral", "qwen2"];
/// Folders with an adapter written by PEFT.
const ADAPTED: [&str; 3] = ["gpt2", "llama_grouped", "qwen2"];
/// Learning rate of the script.
const RATE: f64 = 0.1;
const TOLERANCE: f64 = 1e-4;

type Named = Vec<(String, Tensor)>;

fn test_device() -> Device {
    match std::env::var("BRIMFUL_TEST_DEVICE") {
        Ok(name) => device::find(&name).expect("the device asked for"),
        Err(_) => Device::Cpu,
    }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pretrained").join(name)
}

fn reference(name: &str) -> BTreeMap<String, Tensor> {
    reference_in(&folder(name))
}

fn reference_in(folder: &Path) -> BTreeMap<String, Tensor> {
    let (tensors, _) = save::read(folder.join("reference.safetensors")).expect("read");
    tensors.into_iter().collect()
}

/// Makes an empty folder for a test.
fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pretrained-{name}"));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

fn named(store: &VarStore) -> Named {
    store.variables().into_iter().collect()
}

/// Builds the folder's model with its weights.
fn built(pretrained: &Pretrained, layers: &Layers) -> (VarStore, Model) {
    let store = VarStore::new(test_device());
    let model = layers.build(&store.root()).expect("a model");
    pretrained.load(&named(&store)).expect("loaded");
    (store, model)
}

fn logits(folder: &Path, tokens: &Tensor) -> Tensor {
    let pretrained = Pretrained::open(folder).expect("a folder");
    let (_store, model) = built(&pretrained, &pretrained.config().layers());
    answer(&model, tokens)
}

fn answer(model: &Model, tokens: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward_t(&tokens.to_device(test_device()), false)).to_device(Device::Cpu)
}

fn assert_near(what: &str, found: &Tensor, expected: &Tensor) {
    let found = found.detach().to_device(Device::Cpu).to_kind(Kind::Double);
    let error = (found - expected).abs().max().double_value(&[]);
    assert!(error < TOLERANCE, "{what}: {error:e}");
}

fn assert_after(name: &str, variables: &Named, expected: &BTreeMap<String, Tensor>) {
    let after = expected.keys().filter(|key| key.starts_with("after."));
    assert_eq!(variables.len(), after.count(), "{name}");
    for (variable, value) in variables {
        assert_near(&format!("{name}: {variable}"), value, &expected[&format!("after.{variable}")]);
    }
}

/// Returns each batch of the script, as inputs and targets.
fn batches(reference: &BTreeMap<String, Tensor>) -> Vec<(Tensor, Tensor)> {
    let all = reference["batches"].to_device(test_device());
    let length = all.size()[2] - 1;
    let batch = |at| {
        let batch = all.get(at);
        (batch.narrow(1, 0, length), batch.narrow(1, 1, length))
    };
    (0..all.size()[0]).map(batch).collect()
}

fn mean_loss(logits: &Tensor, targets: &Tensor) -> Loss {
    let (logits, targets) = (logits.flatten(0, 1), targets.flatten(0, 1));
    let loss = logits.cross_entropy_loss(&targets, None::<Tensor>, Reduction::Mean, -100, 0.0);
    Loss::mean(loss)
}

/// Returns the folder's model after a step on each batch of the script.
fn trained(folder: &Path) -> (VarStore, Model) {
    let pretrained = Pretrained::open(folder).expect("a folder");
    let (store, model) = built(&pretrained, &pretrained.config().layers());
    train(&store, &model, 2, &batches(&reference_in(folder)));
    (store, model)
}

/// Takes a step on each batch, in micro-batches of this size.
fn train(store: &VarStore, model: &Model, size: usize, batches: &[(Tensor, Tensor)]) {
    let mut micro = MicroBatcher::new(store, MicroBatches::Samples(size));
    let mut optimizer = Optimizer::new(store, Sgd::new(RATE)).expect("an optimizer");
    for batch in batches {
        let mean = |(x, y): (Tensor, Tensor)| mean_loss(&model.forward_t(&x, true), &y);
        micro.backward(batch, mean).expect("a step");
        optimizer.step().expect("a step");
        optimizer.zero_grad().expect("no gradients");
    }
}

/// Takes a step on each batch in a pipeline; `check` runs before each update.
fn train_piped(pipe: &mut Pipeline, batches: &[(Tensor, Tensor)], check: impl Fn(&Pipeline)) {
    let mut optimizer = pipe.optimizer(Sgd::new(RATE)).expect("an optimizer");
    for (x, y) in batches {
        pipe.backward(x, y, |out: Tensor, y| mean_loss(&out, y)).expect("a step");
        check(pipe);
        optimizer.step().expect("a step");
        optimizer.zero_grad().expect("no gradients");
    }
}

/// Returns the logits of the folder's model with an adapter.
fn adapted_logits(pretrained: &Pretrained, adapter: &AdapterFolder, tokens: &Tensor) -> Tensor {
    let (store, model) = built(pretrained, &pretrained.config().layers().lora(adapter.lora()));
    adapter.load(&named(&store)).expect("loaded");
    answer(&model, tokens)
}

/// Asserts that folders written by `transformers` and PEFT give their logits, and train to the same weights.
fn assert_read_and_trained(folders: &Path) {
    for name in FOLDERS {
        let folder = folders.join(name);
        let expected = reference_in(&folder);
        assert_near(name, &logits(&folder, &expected["tokens"]), &expected["logits"]);
        let (store, _) = trained(&folder);
        assert_after(name, &named(&store), &expected);
    }
    for name in ADAPTED {
        let folder = folders.join(name);
        let expected = reference_in(&folder);
        let pretrained = Pretrained::open(&folder).expect("a folder");
        let adapter =
            AdapterFolder::open(folder.join("adapter"), pretrained.config()).expect("an adapter");
        let found = adapted_logits(&pretrained, &adapter, &expected["tokens"]);
        assert_near(&format!("{name}, adapted"), &found, &expected["adapted"]);
    }
}

#[test]
fn folders_of_transformers_give_its_logits_and_after_ten_steps_in_micro_batches_its_weights() {
    assert_read_and_trained(&folder(""));
}

fn streamed(layers: Layers) -> Builder {
    let stages_per_device = layers.len();
    Pipeline::builder(layers)
        .devices([test_device()])
        .balance(vec![1; stages_per_device])
        .schedule(Schedule::BreadthFirst { stages_per_device })
        .offload(Offload::Host)
}

#[test]
fn a_model_that_lives_on_the_host_is_loaded_trained_and_saved_from_there() {
    let name = "llama_grouped";
    let expected = reference(name);
    let pretrained = Pretrained::open(folder(name)).expect("a folder");
    let pipe = streamed(pretrained.config().layers()).micro_batches(MicroBatches::Count(3));
    let mut pipe = pipe.build().expect("a pipeline");
    pretrained.load(&pipe.variables().expect("variables")).expect("loaded");
    train_piped(&mut pipe, &batches(&expected), |_| ());
    let saved = scratch("streamed").join("saved");
    pretrained.save(&saved, &pipe.variables().expect("variables")).expect("saved");
    let (tensors, _) = save::read(saved.join("model.safetensors")).expect("read");
    assert_after(name, &tensors, &expected);
}

#[test]
fn a_saved_folder_is_the_model_with_its_tokenizer_and_a_tied_head_once() {
    for name in FOLDERS {
        let from = scratch(&format!("saved-{name}"));
        for file in ["config.json", "model.safetensors"] {
            fs::copy(folder(name).join(file), from.join(file)).expect("copied");
        }
        fs::write(from.join("tokenizer.json"), "{}").expect("written");
        let pretrained = Pretrained::open(&from).expect("a folder");
        let (store, _) = built(&pretrained, &pretrained.config().layers());
        let to = from.join("to");
        // The second save replaces the first.
        for _ in 0..2 {
            pretrained.save(&to, &named(&store)).expect("saved");
        }
        let mut files: Vec<_> =
            fs::read_dir(&to).expect("a folder").flatten().map(|file| file.file_name()).collect();
        files.sort();
        assert_eq!(files, ["config.json", "model.safetensors", "tokenizer.json"]);
        let beside = fs::read_dir(&from).expect("a folder").count();
        assert_eq!(beside, 4, "nothing is left beside it");
        let expected = reference(name);
        assert_near(name, &logits(&to, &expected["tokens"]), &expected["logits"]);
        let (tensors, _) = save::read(to.join("model.safetensors")).expect("read");
        let is_untied = ["gpt2_untied", "llama", "llama_biased", "mistral"].contains(&name);
        assert_eq!(tensors.iter().any(|(tensor, _)| tensor == "lm_head.weight"), is_untied);
    }
}

#[test]
fn shards_are_one_model_and_those_that_are_missing_are_named() {
    let (tensors, _) = save::read(folder("llama").join("model.safetensors")).expect("read");
    let to = scratch("shards");
    fs::copy(folder("llama/config.json"), to.join("config.json")).expect("copied");
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let shards = [("one.safetensors", first), ("two.safetensors", second)];
    let mut places = Map::new();
    for (file, part) in shards {
        save::write(to.join(file), part, &save::Metadata::new()).expect("written");
        places.extend(part.iter().map(|(name, _)| (name.clone(), file.into())));
    }
    let index = json!({ "metadata": {}, "weight_map": places });
    fs::write(to.join("model.safetensors.index.json"), index.to_string()).expect("written");
    let expected = reference("llama");
    assert_near("shards", &logits(&to, &expected["tokens"]), &expected["logits"]);

    fs::remove_file(to.join("two.safetensors")).expect("removed");
    let error = Pretrained::open(&to).expect_err("one is missing").to_string();
    assert!(
        error.ends_with(
            "lacks 1 of the 2 files that its index names: two.safetensors: copy them there"
        ),
        "{error}"
    );
}

#[test]
fn shards_stay_inside_their_folder() {
    let to = scratch("shards-inside");
    let outside = scratch("shards-outside");
    let weights = folder("llama").join("model.safetensors");
    fs::copy(folder("llama/config.json"), to.join("config.json")).expect("copied");
    fs::copy(&weights, outside.join("one.safetensors")).expect("copied");
    std::os::unix::fs::symlink(outside.join("one.safetensors"), to.join("link.safetensors"))
        .expect("linked");
    let index = to.join("model.safetensors.index.json");
    let absolute = outside.join("one.safetensors").display().to_string();
    for (named, words) in [
        (json!("../pretrained-shards-outside/one.safetensors"), "which is no file of this folder"),
        (json!(absolute), "which is no file of this folder"),
        (json!("."), "which is no file of this folder"),
        (json!("link.safetensors"), "which is a link to outside of this folder"),
        (json!(3), "weight_map has a value that is no text"),
    ] {
        let map = json!({ "weight_map": { "lm_head.weight": named } });
        fs::write(&index, map.to_string()).expect("written");
        let error = Pretrained::open(&to).expect_err("outside").to_string();
        assert!(error.contains(words), "{named}: {error}");
    }

    // A Hugging Face cache: a folder of links to files beside it.
    let cache = scratch("cache");
    let (blobs, snapshot) = (cache.join("blobs"), cache.join("snapshots/main"));
    fs::create_dir_all(&blobs).expect("a folder");
    fs::create_dir_all(&snapshot).expect("a folder");
    fs::copy(&weights, blobs.join("1234")).expect("copied");
    std::os::unix::fs::symlink("../../blobs/1234", snapshot.join("one.safetensors"))
        .expect("linked");
    fs::copy(folder("llama/config.json"), snapshot.join("config.json")).expect("copied");
    let map = json!({ "weight_map": { "lm_head.weight": "one.safetensors" } });
    fs::write(snapshot.join("model.safetensors.index.json"), map.to_string()).expect("written");
    let expected = reference("llama");
    assert_near("cache", &logits(&snapshot, &expected["tokens"]), &expected["logits"]);
}

#[test]
fn files_that_run_code_and_tensors_that_are_there_twice_are_refused() {
    let to = scratch("python");
    fs::copy(folder("gpt2/config.json"), to.join("config.json")).expect("copied");
    fs::write(to.join("pytorch_model.bin"), "cos\nsystem\n").expect("written");
    let error = Pretrained::open(&to).expect_err("Python's").to_string();
    assert!(error.contains("there is pytorch_model.bin alone, which runs code"), "{error}");
    let (mut tensors, _) = save::read(folder("gpt2").join("model.safetensors")).expect("read");
    let name = "ln_f.weight";
    tensors.push((name.into(), Tensor::ones([16], (Kind::Float, Device::Cpu))));
    save::write(to.join("model.safetensors"), &tensors, &save::Metadata::new()).expect("written");
    let error = Pretrained::open(&to).expect_err("twice").to_string();
    assert!(error.contains("transformer.ln_f.weight is there twice"), "{error}");
}

#[test]
fn integers_and_f8_in_place_of_weights_are_refused_by_name_and_dtype() {
    let to = scratch("quantized");
    fs::copy(folder("llama/config.json"), to.join("config.json")).expect("copied");
    let (tensors, _) = save::read(folder("llama").join("model.safetensors")).expect("read");
    for kind in [Kind::Int8, Kind::Uint8, Kind::Float8e4m3fn] {
        let changed = tensors.iter().map(|(name, tensor)| {
            let is_quantized = name.ends_with("layers.0.mlp.up_proj.weight");
            (name.clone(), tensor.to_kind(if is_quantized { kind } else { Kind::Half }))
        });
        let changed: Vec<_> = changed.collect();
        save::write(to.join("model.safetensors"), &changed, &save::Metadata::new())
            .expect("written");
        let error = Pretrained::open(&to).expect_err("quantized").to_string();
        let says = format!("model.layers.0.mlp.up_proj.weight is of {kind:?}, not of floats");
        assert!(error.contains(&says), "{error}");
    }
}

#[test]
fn names_without_their_prefix_are_the_same_names() {
    let (tensors, _) = save::read(folder("gpt2").join("model.safetensors")).expect("read");
    let to = scratch("prefix");
    fs::copy(folder("gpt2/config.json"), to.join("config.json")).expect("copied");
    let short = |(name, tensor): (String, Tensor)| {
        (name.strip_prefix("transformer.").expect("the prefix").to_owned(), tensor)
    };
    let mut tensors: Named = tensors.into_iter().map(short).collect();
    // A tensor that the first published files have.
    tensors.push(("h.0.attn.bias".into(), Tensor::ones([32, 32], (Kind::Float, Device::Cpu))));
    save::write(to.join("model.safetensors"), &tensors, &save::Metadata::new()).expect("written");
    let expected = reference("gpt2");
    assert_near("prefix", &logits(&to, &expected["tokens"]), &expected["logits"]);
}

/// Writes a changed config of one of these folders elsewhere.
fn write_changed(file: &str, to: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let text = fs::read_to_string(folder(file)).expect("read");
    let mut config = serde_json::from_str(&text).expect("a config");
    change(&mut config);
    fs::write(to, Value::Object(config).to_string()).expect("written");
}

/// Returns the error of the Llama's folder with this field in its config.
fn refused(field: &str, value: Value) -> PretrainedError {
    let to = scratch(&format!("refused-{field}"));
    write_changed("llama/config.json", &to.join("config.json"), |config| {
        config.insert(field.into(), value);
    });
    fs::copy(folder("llama/model.safetensors"), to.join("model.safetensors")).expect("copied");
    Pretrained::open(&to).expect_err(field)
}

#[test]
fn folders_that_are_wrong_are_refused_before_anything_is_built() {
    for (field, value, words) in [
        ("model_type", json!("mamba"), "'mamba': supported are gpt2, llama, mistral, qwen2"),
        ("hidden_act", json!("relu"), "hidden_act is 'relu': supported are silu"),
        ("num_hidden_layers", json!(-2), "num_hidden_layers is missing, or is no whole number"),
        ("num_key_value_heads", json!(3), "is 3, which does not divide 2"),
        ("intermediate_size", json!(25), "mlp.down_proj.weight is [16, 24], not [16, 25]"),
        ("num_hidden_layers", json!(3), "model.layers.2.input_layernorm.weight is missing"),
        ("num_hidden_layers", json!(1), "model.layers.1.input_layernorm.weight belongs nowhere"),
        (
            "rope_parameters",
            json!({"rope_type": "yarn"}),
            "rope_type is 'yarn': supported are default, linear, llama3",
        ),
    ] {
        let error = refused(field, value).to_string();
        assert!(error.contains(words), "{field}: {error}");
    }
    let empty = Pretrained::open(scratch("empty")).expect_err("nothing there").to_string();
    assert!(empty.starts_with("cannot read '") && empty.contains("config.json"), "{empty}");
}

#[test]
fn sizes_types_and_signs_that_cannot_be_are_refused_with_the_field() {
    for (field, value, words) in [
        ("vocab_size", json!(41), "model.embed_tokens.weight is [40, 16], not [41, 16]"),
        ("vocab_size", json!("40"), "vocab_size is missing, or is no whole number above 0"),
        ("hidden_size", json!(1_i64 << 62), "is 4611686018427387904: it can be 16777216 at most"),
        ("num_hidden_layers", json!(1_000_000_000_000_i64), "it can be 10000 at most"),
        ("num_hidden_layers", json!(9999), "21 tensors are too few for 9999 layers"),
        ("head_dim", json!(7), "head_dim makes heads of 7 numbers, which cannot turn in pairs"),
        ("head_dim", json!(1 << 24), "head_dim is 16777216: it can be 8388608 at most"),
        ("rms_norm_eps", json!(-1e-6), "give a number from 0 to below 1"),
        ("attention_dropout", json!(1.5), "attention_dropout is 1.5: give a number from 0"),
        ("eos_token_id", json!("2"), "eos_token_id is neither an integer nor a list"),
        ("tie_word_embeddings", json!("no"), "tie_word_embeddings is neither true nor false"),
        ("rope_theta", json!(-1), "rope_theta is missing, or is no number above 0"),
        ("rope_scaling", json!("dynamic"), "rope_scaling is no object of fields"),
        ("rope_scaling", json!({"type": "dynamic"}), "rope_scaling.type is 'dynamic': supported"),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 2.0, "mscale": 0.7}),
            "rope_scaling.mscale is not known here",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "factor": 2.0}),
            "rope_parameters.factor is not known here",
        ),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5: only 1 is supported"),
        ("quantization_config", json!({"bits": 4}), "quantization_config is given, which is not"),
        ("logit_scale", json!(0.0625), "logit_scale is not known here, and may change what is"),
    ] {
        let error = refused(field, value).to_string();
        assert!(error.contains(words), "{field}: {error}");
    }
}

#[test]
fn fields_that_are_switched_off_or_without_effect_are_passed_over() {
    let to = copied_folder("llama", "switched-off", |config| {
        for (field, value) in [
            ("logit_scale", json!(null)),
            ("use_qk_norm", json!(false)),
            ("residual_dropout", json!(0.0)),
            ("quantization_config", json!(null)),
            ("sliding_window", json!(4)),
            ("pretraining_tp", json!(2)),
            ("unsloth_version", json!("2026.1")),
            ("is_llama_config", json!(true)),
            ("max_sequence_length", json!(32)),
        ] {
            config.insert(field.into(), value);
        }
    });
    let expected = reference("llama");
    assert_near("switched off", &logits(&to, &expected["tokens"]), &expected["logits"]);
}

#[test]
fn windows_and_shared_heads_are_those_of_transformers_where_nothing_is_said() {
    for (field, value, context) in [
        ("sliding_window", None, 4096),
        ("sliding_window", Some(json!(null)), 20_000),
        ("sliding_window", Some(json!(10)), 10),
    ] {
        let to = copied_folder("mistral", "windows", |config| {
            config.insert("max_position_embeddings".into(), json!(20_000));
            config.remove(field);
            config.extend(value.map(|value| (field.to_owned(), value)));
        });
        assert_eq!(Pretrained::open(&to).expect("a folder").config().context(), context);
    }
    for (fields, context) in [
        (json!({"sliding_window": 8}), 32),
        (json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": null}), 32),
        (
            json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": null,
            "max_window_layers": 1}),
            8,
        ),
        (
            json!({"sliding_window": 8, "use_sliding_window": true,
            "layer_types": ["sliding_attention", "full_attention"]}),
            8,
        ),
    ] {
        let to = copied_folder("qwen2", "windows", |config| {
            config.extend(fields.as_object().expect("fields").clone());
        });
        assert_eq!(Pretrained::open(&to).expect("a folder").config().context(), context);
    }
    let to = copied_folder("mistral", "windows", |config| {
        config.remove("num_key_value_heads");
    });
    let error = Pretrained::open(&to).expect_err("eight in transformers").to_string();
    assert!(error.contains("num_key_value_heads is missing"), "{error}");
}

/// Copies one of these folders with a changed config.
fn copied_folder(name: &str, to: &str, change: impl FnOnce(&mut Map<String, Value>)) -> PathBuf {
    let to = scratch(to);
    write_changed(&format!("{name}/config.json"), &to.join("config.json"), change);
    let weights = "model.safetensors";
    fs::copy(folder(name).join(weights), to.join(weights)).expect("copied");
    to
}

#[test]
fn a_tied_head_is_the_table_unless_the_file_has_another() {
    let name = "llama_grouped";
    let table = "model.embed_tokens.weight";
    let read = || save::read(folder(name).join("model.safetensors")).expect("read").0;
    let to = scratch("tied");
    fs::copy(folder(name).join("config.json"), to.join("config.json")).expect("copied");
    let write = |tensors: &Named| {
        save::write(to.join("model.safetensors"), tensors, &save::Metadata::new())
            .expect("written");
    };
    let expected = reference(name);
    // First the table under the head's name alone, then both.
    let mut tensors = read();
    for (name, _) in tensors.iter_mut().filter(|(name, _)| name == table) {
        *name = "lm_head.weight".into();
    }
    write(&tensors);
    assert_near("head alone", &logits(&to, &expected["tokens"]), &expected["logits"]);
    let head = tensors.iter().find(|(name, _)| name == "lm_head.weight").expect("it").1.copy();
    tensors.push((table.into(), head.shallow_clone()));
    write(&tensors);
    assert_near("both", &logits(&to, &expected["tokens"]), &expected["logits"]);

    let mut tensors = read();
    tensors.push(("lm_head.weight".into(), &head * 2.0));
    write(&tensors);
    let pretrained = Pretrained::open(&to).expect("a folder");
    let (store, model) = built(&pretrained, &pretrained.config().layers());
    let twice = (&expected["logits"] * 2.0).to_kind(Kind::Double);
    assert_near("another", &answer(&model, &expected["tokens"]), &twice);
    // The saved config says so.
    pretrained.save(to.join("saved"), &named(&store)).expect("saved");
    assert_near("saved", &logits(&to.join("saved"), &expected["tokens"]), &twice);
    let config = fs::read_to_string(to.join("saved/config.json")).expect("read");
    assert!(config.contains("\"tie_word_embeddings\": false"), "{config}");
}

#[test]
fn a_folder_with_other_files_is_not_written_over() {
    let pretrained = Pretrained::open(folder("gpt2")).expect("a folder");
    let (store, _) = built(&pretrained, &pretrained.config().layers());
    let taken = scratch("taken");
    fs::write(taken.join("thesis.tex"), "years of work").expect("written");
    let error = pretrained.save(&taken, &named(&store)).expect_err("taken").to_string();
    assert!(error.contains("holds thesis.tex, which would be lost"), "{error}");
    assert!(taken.join("thesis.tex").is_file());
}

#[test]
fn older_files_say_rotary_positions_elsewhere() {
    let to = scratch("older");
    write_changed("llama_grouped/config.json", &to.join("config.json"), |config| {
        let mut scaling = config.remove("rope_parameters").expect("scaling");
        let base = scaling.as_object_mut().and_then(|map| map.remove("rope_theta"));
        config.insert("rope_theta".into(), base.expect("a base"));
        config.insert("rope_scaling".into(), scaling);
    });
    let weights = folder("llama_grouped/model.safetensors");
    fs::copy(weights, to.join("model.safetensors")).expect("copied");
    let older = Pretrained::open(&to).expect("a folder");
    let newer = Pretrained::open(folder("llama_grouped")).expect("a folder");
    assert_eq!(older.config(), newer.config());
}

/// Returns the logits of tokens that come in these portions.
fn in_portions(config: &Config, pretrained: &Pretrained, x: &Tensor, portions: &[i64]) -> Tensor {
    let cache = KeyValueCache::new(x.size()[1]);
    let (_store, model) = built(pretrained, &config.layers_with_cache(&cache));
    let mut outputs = Vec::new();
    for &portion in portions {
        let part = x.narrow(1, cache.seen(), portion);
        // Runs twice, as after a failure: tokens that were not counted as seen are computed anew.
        let _first = tch::no_grad(|| model.forward_t(&part, false));
        outputs.push(tch::no_grad(|| model.forward_t(&part, false)));
        cache.advance(portion);
    }
    Tensor::cat(&outputs, 1)
}

#[test]
fn tokens_that_come_one_by_one_give_the_logits_of_all_at_once() {
    for name in FOLDERS {
        let expected = reference(name);
        let pretrained = Pretrained::open(folder(name)).expect("a folder");
        let x = expected["tokens"].to_device(test_device());
        for portions in [vec![12], vec![5, 1, 1, 1, 1, 1, 1, 1], vec![1, 4, 7]] {
            let found = in_portions(pretrained.config(), &pretrained, &x, &portions);
            assert_near(&format!("{name} in {portions:?}"), &found, &expected["logits"]);
        }
    }
}

#[test]
fn a_streamed_model_keeps_what_it_has_seen_too() {
    let name = "llama_grouped";
    let expected = reference(name);
    let pretrained = Pretrained::open(folder(name)).expect("a folder");
    let cache = KeyValueCache::new(12);
    let pipe = streamed(pretrained.config().layers_with_cache(&cache));
    let mut pipe = pipe.build().expect("a pipeline");
    pretrained.load(&pipe.variables().expect("variables")).expect("loaded");
    let tokens = expected["tokens"].to_device(test_device());
    let mut outputs = Vec::new();
    for portion in [8, 1, 1, 1, 1] {
        let part = tokens.narrow(1, cache.seen(), portion);
        outputs.push(pipe.map(&part, |out: Tensor| out).expect("logits"));
        cache.advance(portion);
    }
    assert_near(name, &Tensor::cat(&outputs, 1), &expected["logits"]);
}

/// An offloaded model, trained with LoRA for two steps.
struct LoraRun {
    pretrained: Pretrained,
    before: Named,
    after: Named,
}

impl LoraRun {
    fn new(name: &str, lora: &Lora) -> Self {
        let pretrained = Pretrained::open(folder(name)).expect("a folder");
        let layers = pretrained.config().layers().lora(lora);
        let mut pipe =
            streamed(layers).micro_batches(MicroBatches::Count(3)).build().expect("a pipeline");
        pretrained.load(&pipe.variables().expect("variables")).expect("loaded");
        let before = copied(pipe.variables().expect("variables"));
        train_piped(&mut pipe, &batches(&reference(name))[..2], |pipe| {
            for (gradient, _) in pipe.gradients().expect("gradients") {
                assert!(Lora::is_adapter(&gradient), "{gradient} is frozen");
            }
        });
        Self { pretrained, before, after: copied(pipe.variables().expect("variables")) }
    }
}

fn copied(variables: Named) -> Named {
    variables.into_iter().map(|(name, tensor)| (name, tensor.detach().copy())).collect()
}

#[test]
fn lora_trains_what_it_added_alone_and_is_saved_loaded_and_merged() {
    for name in ADAPTED {
        let lora = Lora { alpha: 6.0, ..Lora::new(3) };
        let LoraRun { pretrained, before, after: variables } = LoraRun::new(name, &lora);
        for ((weight, value), (_, now)) in before.iter().zip(&variables) {
            assert_eq!(now != value, Lora::is_adapter(weight), "{name}: {weight}");
        }
        let to = scratch(&format!("lora-{name}"));
        pretrained.save_adapter(to.join("adapter"), &lora, &variables).expect("saved");
        pretrained.save_merged(to.join("merged"), &lora, &variables).expect("saved");

        let adapter =
            AdapterFolder::open(to.join("adapter"), pretrained.config()).expect("an adapter");
        assert_eq!((adapter.lora().rank, adapter.lora().alpha), (3, 6.0));
        let expected = reference(name);
        let found = adapted_logits(&pretrained, &adapter, &expected["tokens"]);
        let merged = logits(&to.join("merged"), &expected["tokens"]);
        assert_near(name, &found, &merged.to_kind(Kind::Double));
        let changed = (found - &expected["logits"]).abs().max();
        assert!(changed.double_value(&[]) > 1e-3, "{name} has learnt something");
    }
}

#[test]
fn adapters_that_would_be_taken_for_others_are_refused_with_the_field() {
    let gpt2 = Pretrained::open(folder("gpt2")).expect("a folder");
    for (field, value, words) in [
        ("peft_type", json!("IA3"), "peft_type is 'IA3': supported are LORA"),
        ("peft_type", json!(null), "peft_type is missing, or is no text"),
        ("task_type", json!("SEQ_CLS"), "task_type is 'SEQ_CLS': supported are CAUSAL_LM"),
        ("use_dora", json!(true), "use_dora is given, which is not known here: merge it"),
        ("use_dora", json!("yes"), "use_dora is given, which is not known here"),
        ("bias", json!("all"), "bias is 'all': supported are none"),
        ("modules_to_save", json!(["wte"]), "modules_to_save is given, which is not known here"),
        (
            "init_lora_weights",
            json!("pissa_niter_4"),
            "init_lora_weights is 'pissa_niter_4', which",
        ),
        ("target_modules", json!(["c_attn", 3]), "target_modules is neither a text nor a list"),
        ("target_modules", json!([]), "target_modules is missing, or empty"),
        ("target_modules", json!(["q_proj"]), "target_modules means no layer of this model"),
        ("target_modules", json!("("), "target_modules is no regular expression"),
        ("target_modules", json!(["wte"]), "target_modules means 'transformer.wte' too"),
        ("target_modules", json!(".*"), "target_modules means 'lm_head' too"),
        ("layers_pattern", json!("h"), "layers_pattern goes with layers_to_transform alone"),
        ("r", json!(1_i64 << 62), "r is 4611686018427387904: it can be 1048576 at most"),
        ("r", json!(2), "c_attn.lora_A.weight is [3, 16], not [2, 16]"),
        ("rank_pattern", json!({"c_fc": "x"}), "rank_pattern has \"x\", which is no rank"),
        (
            "rank_pattern",
            json!({"c_fc": 3, "fc": 4, "c.*": 2}),
            "rank_pattern says two numbers for",
        ),
        ("use_rslora", json!(1), "use_rslora is neither true nor false"),
        ("use_mora", json!(true), "use_mora is not known here, and may change what is computed"),
    ] {
        let error = refused_adapter(&gpt2, |config| {
            config.insert(field.into(), value);
        });
        assert!(error.contains(words), "{field}: {error}");
    }
}

/// Returns the error of the GPT-2's adapter with a changed config, for a model.
fn refused_adapter(model: &Pretrained, change: impl FnOnce(&mut Map<String, Value>)) -> String {
    let to = scratch("strange-adapter");
    write_changed("gpt2/adapter/adapter_config.json", &to.join("adapter_config.json"), change);
    let weights = "adapter_model.safetensors";
    fs::copy(folder("gpt2/adapter").join(weights), to.join(weights)).expect("copied");
    AdapterFolder::open(&to, model.config()).expect_err("it is changed").to_string()
}

#[test]
fn an_adapter_of_another_model_is_refused_with_what_is_left_over() {
    let deeper = scratch("deeper");
    let [llama, gpt2] =
        ["llama", "gpt2"].map(|name| Pretrained::open(folder(name)).expect("a folder"));
    let adapter = folder("gpt2/adapter");
    let error = AdapterFolder::open(&adapter, llama.config()).expect_err("another model");
    assert!(error.to_string().contains("means no layer of this model"), "{error}");

    // An adapter of three layers for a model of two.
    let (mut tensors, _) = save::read(adapter.join("adapter_model.safetensors")).expect("read");
    let more: Named = tensors
        .iter()
        .filter(|(name, _)| name.contains(".h.1."))
        .map(|(name, tensor)| (name.replace(".h.1.", ".h.2."), tensor.shallow_clone()))
        .collect();
    tensors.extend(more);
    fs::copy(adapter.join("adapter_config.json"), deeper.join("adapter_config.json"))
        .expect("copied");
    let weights = deeper.join("adapter_model.safetensors");
    save::write(&weights, &tensors, &save::Metadata::new()).expect("written");
    let error = AdapterFolder::open(&deeper, gpt2.config()).expect_err("left over").to_string();
    assert!(error.contains("transformer.h.2.attn.c_attn.lora_A.weight belongs nowhere"), "{error}");
    assert!(error.ends_with("give the model that the adapter was trained with"), "{error}");
    fs::rename(&weights, deeper.join("adapter_model.bin")).expect("renamed");
    let error = AdapterFolder::open(&deeper, gpt2.config()).expect_err("Python's").to_string();
    assert!(error.contains("adapter_model.bin alone, which runs code"), "{error}");
}

#[test]
fn lora_on_a_device_and_streamed_is_the_same() {
    let (name, lora) = ("llama_grouped", Lora::new(2));
    let LoraRun { pretrained, before, after } = LoraRun::new(name, &lora);
    let (store, model) = built(&pretrained, &pretrained.config().layers().lora(&lora));
    let before: BTreeMap<String, Tensor> = before.into_iter().collect();
    for (variable, mut own) in store.variables() {
        tch::no_grad(|| own.copy_(&before[&variable]));
    }
    train(&store, &model, 1, &batches(&reference(name))[..2]);
    let own = store.variables();
    for (variable, value) in &after {
        let expected = own[variable].detach().to_device(Device::Cpu).to_kind(Kind::Double);
        assert_near(variable, value, &expected);
    }
}
