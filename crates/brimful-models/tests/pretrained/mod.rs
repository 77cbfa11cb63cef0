//! Folders that `transformers` wrote, with what it made of them: loaded, trained, saved and gone on with.
//!
//! make_reference.py, beside this file, says how they were made; `peers` lets `transformers` and PEFT themselves take part.

mod peers;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use brimful::layers::Model;
use brimful::nn::Lora;
use brimful::optim::{Optimizer, Sgd};
use brimful::pipeline::{Builder, Homes};
use brimful::schedule::Schedule;
use brimful::{Layers, Loss, MicroBatcher, Pipeline, Size, device, save};
use brimful_models::KeyValueCache;
use brimful_models::pretrained::{AdapterFolder, Config, Pretrained, PretrainedError};
use serde_json::{Map, Value, json};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

const FOLDERS: [&str; 7] =
    ["gpt2", "gpt2_untied", "llama", "llama_grouped", "llama_biased", "mistral", "qwen2"];
/// Those that PEFT wrote an adapter to.
const ADAPTED: [&str; 3] = ["gpt2", "llama_grouped", "qwen2"];
/// The learning rate of the script.
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

/// An empty folder of this test's own.
fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pretrained-{name}"));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

fn named(store: &VarStore) -> Named {
    store.variables().into_iter().collect()
}

/// The folder's model with its weights.
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

/// Each batch of the script, as inputs and targets.
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

/// The folder's model after a step on each batch of the script.
fn trained(folder: &Path) -> (VarStore, Model) {
    let pretrained = Pretrained::open(folder).expect("a folder");
    let (store, model) = built(&pretrained, &pretrained.config().layers());
    train(&store, &model, 2, &batches(&reference_in(folder)));
    (store, model)
}

/// A step on each batch, in micro-batches of this size.
fn train(store: &VarStore, model: &Model, size: usize, batches: &[(Tensor, Tensor)]) {
    let mut micro = MicroBatcher::new(store, Size::Fixed(size));
    let mut optimizer = Optimizer::new(store, Sgd::new(RATE)).expect("an optimizer");
    for batch in batches {
        let mean = |(x, y): (Tensor, Tensor)| mean_loss(&model.forward_t(&x, true), &y);
        micro.backward(batch, mean).expect("a step");
        optimizer.step().expect("a step");
        optimizer.zero_grad().expect("no gradients");
    }
}

/// The same of a pipeline; `check` sees it before each update.
fn train_piped(pipe: &mut Pipeline, batches: &[(Tensor, Tensor)], check: impl Fn(&Pipeline)) {
    let mut optimizer = pipe.optimizer(Sgd::new(RATE)).expect("an optimizer");
    for (x, y) in batches {
        pipe.backward(x, y, |out: Tensor, y| mean_loss(&out, y)).expect("a step");
        check(pipe);
        optimizer.step().expect("a step");
        optimizer.zero_grad().expect("no gradients");
    }
}

/// The logits of the folder's model with an adapter in it.
fn adapted_logits(pretrained: &Pretrained, adapter: &AdapterFolder, tokens: &Tensor) -> Tensor {
    let (store, model) = built(pretrained, &pretrained.config().layers().lora(adapter.lora()));
    adapter.load(&named(&store)).expect("loaded");
    answer(&model, tokens)
}

/// Makes sure that what `transformers` and PEFT have written in a folder of folders is what they say of it.
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
        let adapter = AdapterFolder::open(folder.join("adapter")).expect("an adapter");
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
        .homes(Homes::Host)
}

#[test]
fn a_model_that_lives_on_the_host_is_loaded_trained_and_saved_from_there() {
    let name = "llama_grouped";
    let expected = reference(name);
    let pretrained = Pretrained::open(folder(name)).expect("a folder");
    let pipe = streamed(pretrained.config().layers()).micro_batches(3);
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
        // A second time takes the place of the first.
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
fn names_without_their_prefix_are_the_same_names() {
    let (tensors, _) = save::read(folder("gpt2").join("model.safetensors")).expect("read");
    let to = scratch("prefix");
    fs::copy(folder("gpt2/config.json"), to.join("config.json")).expect("copied");
    let short = |(name, tensor): (String, Tensor)| {
        (name.strip_prefix("transformer.").expect("the prefix").to_owned(), tensor)
    };
    let mut tensors: Named = tensors.into_iter().map(short).collect();
    // As the first published files have it.
    tensors.push(("h.0.attn.bias".into(), Tensor::ones([32, 32], (Kind::Float, Device::Cpu))));
    save::write(to.join("model.safetensors"), &tensors, &save::Metadata::new()).expect("written");
    let expected = reference("gpt2");
    assert_near("prefix", &logits(&to, &expected["tokens"]), &expected["logits"]);
}

/// Writes a config of these folders elsewhere, changed.
fn write_changed(file: &str, to: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let text = fs::read_to_string(folder(file)).expect("read");
    let mut config = serde_json::from_str(&text).expect("a config");
    change(&mut config);
    fs::write(to, Value::Object(config).to_string()).expect("written");
}

/// The error of the llama's folder with this in its config.
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
        ("model_type", json!("mamba"), "'mamba': those known are gpt2, llama, mistral, qwen2"),
        ("hidden_act", json!("relu"), "hidden_act is 'relu': those known are silu"),
        ("num_hidden_layers", json!(-2), "num_hidden_layers is missing, or is no whole number"),
        ("num_key_value_heads", json!(3), "is 3, which 2 is no multiple of"),
        ("intermediate_size", json!(25), "mlp.down_proj.weight is [16, 24], not [16, 25]"),
        ("num_hidden_layers", json!(3), "model.layers.2.input_layernorm.weight is missing"),
        ("num_hidden_layers", json!(1), "model.layers.1.input_layernorm.weight belongs nowhere"),
        (
            "rope_parameters",
            json!({"rope_type": "yarn"}),
            "rope_type is 'yarn': those known are default, linear, llama3",
        ),
    ] {
        let error = refused(field, value).to_string();
        assert!(error.contains(words), "{field}: {error}");
    }
    let empty = Pretrained::open(scratch("empty")).expect_err("nothing there").to_string();
    assert!(empty.starts_with("cannot read '") && empty.contains("config.json"), "{empty}");
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

/// The logits of tokens that come in these portions.
fn in_portions(config: &Config, pretrained: &Pretrained, x: &Tensor, portions: &[i64]) -> Tensor {
    let cache = KeyValueCache::new(x.size()[1]);
    let (_store, model) = built(pretrained, &config.layers_with_cache(&cache));
    let mut outputs = Vec::new();
    for &portion in portions {
        let part = x.narrow(1, cache.seen(), portion);
        // Run twice, as after a failure: what was not counted as seen is seen anew.
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

/// A streamed model that was trained with LoRA for two steps.
struct LoraRun {
    pretrained: Pretrained,
    before: Named,
    after: Named,
}

impl LoraRun {
    fn new(name: &str, lora: &Lora) -> Self {
        let pretrained = Pretrained::open(folder(name)).expect("a folder");
        let layers = pretrained.config().layers().lora(lora);
        let mut pipe = streamed(layers).micro_batches(3).build().expect("a pipeline");
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
        let merged = lora.merged(&variables, pretrained.config().weight_order()).expect("merged");
        pretrained.save(to.join("merged"), &merged).expect("saved");

        let adapter = AdapterFolder::open(to.join("adapter")).expect("an adapter");
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
    let to = scratch("strange-adapter");
    let file = to.join("adapter_config.json");
    for (field, value, words) in [
        ("peft_type", json!("IA3"), "peft_type is 'IA3': those known are LORA"),
        ("use_dora", json!(true), "use_dora is true: it can be false alone"),
        ("bias", json!("all"), "bias is 'all': those known are none"),
        ("alpha_pattern", json!({"c_fc": 9}), "alpha_pattern is given: it can be empty alone"),
        ("modules_to_save", json!(["wte"]), "modules_to_save is given: it can be empty alone"),
    ] {
        write_changed("gpt2/adapter/adapter_config.json", &file, |config| {
            config.insert(field.into(), value);
        });
        let error = AdapterFolder::open(&to).expect_err(field).to_string();
        assert!(error.contains(words), "{field}: {error}");
    }
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
