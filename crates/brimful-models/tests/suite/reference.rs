//! The models have the variables of torchvision's models and of GPT-2, and the same outputs with the same weights.
//!
//! The files in `../reference/` come from bench/peers/reference_models.py, which explains how. `../pretrained/` has
//! whole folders, from `transformers`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use brimful::Layers;
use brimful::layers::Model;
use brimful_models::{Gpt, gpt, resnet18, resnet50, resnet101};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

const PRIME: i64 = 20011;

/// Reference of a model: variables with their shapes, and the logits of both modes.
struct Reference {
    shapes: BTreeMap<String, Vec<i64>>,
    eval: Vec<f64>,
    train: Vec<f64>,
}

impl Reference {
    fn read(text: &str) -> Self {
        let mut found = Self { shapes: BTreeMap::new(), eval: vec![], train: vec![] };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, rest) = line.split_once(' ').expect("a name and numbers");
            match name {
                "eval" => found.eval = parse(rest),
                "train" => found.train = parse(rest),
                _ => drop(found.shapes.insert(name.to_owned(), parse(rest))),
            }
        }
        found
    }
}

fn parse<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> Vec<T> {
    text.split_whitespace().map(|number| number.parse().expect("a number")).collect()
}

/// Returns pseudo-random numbers in [-0.5, 0.5) that depend only on the name, as in the script.
fn numbers(name: &str, shape: &[i64]) -> Tensor {
    let seed = name.bytes().zip(1..).map(|(byte, i)| i * i64::from(byte)).sum::<i64>() % 9973;
    let k = Tensor::arange(shape.iter().product::<i64>(), (Kind::Int64, Device::Cpu));
    let mixed = (&k * (&k + seed) * 7919 + seed).remainder(PRIME).to_kind(Kind::Double);
    (mixed / PRIME as f64 - 0.5).view(shape)
}

/// Returns the variable's value, as in the script.
fn value(name: &str, shape: &[i64]) -> Tensor {
    let u = numbers(name, shape);
    match (shape.len(), name.rsplit('.').next()) {
        (2.., _) => u * (24.0 / shape[1..].iter().product::<i64>() as f64).sqrt(),
        (_, Some("running_var")) => u + 1.0,
        (_, Some("weight")) => u * 0.2 + 1.0,
        _ => u * 0.2,
    }
}

fn shapes_of(vs: &VarStore) -> BTreeMap<String, Vec<i64>> {
    vs.variables().into_iter().map(|(name, variable)| (name, variable.size())).collect()
}

/// Returns the largest difference, relative to the largest number expected.
fn difference(got: &Tensor, expected: &[f64]) -> f64 {
    let expected = Tensor::from_slice(expected);
    let difference = (got.to_kind(Kind::Double).flatten(0, -1) - &expected).abs().max();
    (difference / expected.abs().max()).double_value(&[])
}

/// Builds the model in this precision, with the same weights, through a saved file.
fn model(layers: &Layers, kind: Kind) -> (VarStore, Model) {
    let mut vs = VarStore::new(Device::Cpu);
    let model = layers.build(&vs.root()).expect("a model");
    let weights = shapes_of(&vs).into_iter().map(|(n, s)| (n.clone(), value(&n, &s).to_kind(kind)));
    let file = unique_file();
    Tensor::write_safetensors(&weights.collect::<Vec<_>>(), &file).expect("written");
    vs.load(&file).expect("loaded");
    std::fs::remove_file(file).expect("removed");
    (vs, model)
}

fn unique_file() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(format!("brimful-reference-{process}-{count}.safetensors"))
}

/// Runs the model in this precision on `x`, in evaluation or training mode, and compares names, shapes and outputs.
fn check(
    layers: &Layers,
    other: &Reference,
    x: &Tensor,
    kind: Kind,
    modes: &[bool],
    tolerance: f64,
) {
    let (vs, model) = model(layers, kind);
    assert_eq!(shapes_of(&vs), other.shapes);
    for &train in modes {
        let expected = if train { &other.train } else { &other.eval };
        let error = difference(&tch::no_grad(|| model.forward_t(x, train)), expected);
        assert!(error < tolerance, "{kind:?}, training {train}: {error:e}");
    }
}

fn check_resnet(layers: &Layers, text: &str) {
    let other = Reference::read(text);
    let x = numbers("input", &[2, 3, 64, 64]) * 4.0;
    // Training comes last, since it changes the running statistics.
    check(layers, &other, &x, Kind::Double, &[false, true], 1e-10);
    // In single precision, training says little: the last normalisations have eight numbers each, and torchvision's
    // own ResNet-101 differs by 4e-4 from its outputs in double precision.
    check(layers, &other, &x.to_kind(Kind::Float), Kind::Float, &[false], 1e-5);
}

#[test]
fn resnet18_is_torchvisions() {
    check_resnet(&resnet18(10), include_str!("../reference/resnet18.txt"));
}

#[test]
fn resnet50_is_torchvisions() {
    check_resnet(&resnet50(10), include_str!("../reference/resnet50.txt"));
}

#[test]
fn resnet101_is_torchvisions() {
    check_resnet(&resnet101(10), include_str!("../reference/resnet101.txt"));
}

#[test]
fn a_gpt_is_gpt2() {
    let other = Reference::read(include_str!("../reference/gpt2.txt"));
    let (context, vocabulary) = (8, 11);
    let config = Gpt { layers: 2, width: 24, heads: 3, context, vocabulary, ..Gpt::gpt2_small() };
    let tokens = ((numbers("input", &[2, 7]) + 0.5) * vocabulary as f64).to_kind(Kind::Int64);
    check(&gpt(&config), &other, &tokens, Kind::Double, &[false], 1e-10);
    check(&gpt(&config), &other, &tokens, Kind::Float, &[false], 1e-5);
}
