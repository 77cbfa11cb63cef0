//! Fingerprint of the trained parameters. Ranks sum gradients in order, so all of them must have the same
//! parameters in the same order.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tch::Tensor;
use tch::nn::Variables;

use crate::Result;
use crate::auto::{hash_of, hash_of_variables};
use crate::world::{World, WorldError};

/// Fingerprint of a list of variables, without their values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trained {
    parameters: usize,
    numbers: usize,
    /// Hash of names, shapes and dtypes, in order.
    hash: String,
}

impl Trained {
    /// Returns the fingerprint of these parameters, in the order in which their gradients are summed.
    pub(crate) fn of(parameters: &[Tensor], names: &Names) -> Self {
        Self::of_named(
            parameters.iter().map(|tensor| (names.of(tensor).unwrap_or_default(), tensor)),
        )
    }

    fn of_named<'a>(named: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Self {
        let named: Vec<_> = named.collect();
        Self {
            parameters: named.len(),
            numbers: named.iter().map(|(_, tensor)| tensor.numel()).sum(),
            hash: hash_of_variables(named.into_iter()),
        }
    }

    /// Combines several fingerprints into one.
    pub(crate) fn all<'a>(parts: impl Iterator<Item = &'a Self>) -> Self {
        let mut whole = Self::default();
        let mut hashes = Vec::new();
        for part in parts {
            whole.parameters += part.parameters;
            whole.numbers += part.numbers;
            hashes.push(part.hash.as_str());
        }
        whole.hash = hash_of(&hashes.join(" "));
        whole
    }

    /// Fails if replicas train different parameters, given the fingerprints of all their ranks or parts. Passes
    /// if there are none.
    pub(super) fn check_replicas(parts: &[&Self], of_replica: usize) -> Result<(), WorldError> {
        let replicas = parts.chunks(of_replica);
        let found = replicas.map(|parts| Self::all(parts.iter().copied()).to_string()).collect();
        WorldError::check_same("what is trained", found)
    }
}

impl Display for Trained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, numbers, hash } = self;
        write!(f, "{parameters} parameters, {numbers} numbers, #{hash}")
    }
}

/// The variables of a store by name, in the order of the names.
#[derive(Debug)]
pub(crate) struct Names {
    named: Vec<(String, Tensor)>,
    /// Index by address. Where several names share an address, as all empty tensors do, the first counts.
    places: HashMap<usize, usize>,
}

/// Returns the store's variables by name, as they are now.
pub(crate) fn names(variables: &Mutex<Variables>) -> Names {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let named = variables.named_variables.iter();
    let mut named: Vec<_> = named.map(|(name, t)| (name.clone(), t.shallow_clone())).collect();
    // The store keeps them in a hash map, whose order differs from process to process.
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut places = HashMap::new();
    for (at, (_, tensor)) in named.iter().enumerate() {
        places.entry(tensor.data_ptr() as usize).or_insert(at);
    }
    Names { named, places }
}

impl Names {
    /// Returns the name of a variable.
    pub(crate) fn of(&self, tensor: &Tensor) -> Option<&str> {
        let at = self.places.get(&(tensor.data_ptr() as usize))?;
        Some(&self.named[*at].0)
    }

    /// Returns the variable of this name.
    pub(crate) fn tensor(&self, name: &str) -> Option<Tensor> {
        let at = self.named.binary_search_by(|(other, _)| other.as_str().cmp(name)).ok()?;
        Some(self.named[at].1.shallow_clone())
    }

    /// Returns all variables with their names.
    pub(crate) fn into_list(self) -> Vec<(String, Tensor)> {
        self.named
    }

    /// Checks that all ranks have one model, and broadcasts the first rank's values.
    pub(crate) fn join(self, world: &World) -> Result<()> {
        let named = self.named.iter().map(|(name, tensor)| (name.as_str(), tensor));
        world.agree("the model", &Trained::of_named(named))?;
        let variables: Vec<Tensor> = self.named.into_iter().map(|(_, tensor)| tensor).collect();
        world.broadcast(&variables, 0)
    }
}
