//! The averages follow the weights: everything that can fail first, then what allocates nothing.

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use super::{Average, Ema};
use crate::Result;
use crate::optim::OptimError;
use crate::optim::step::SCRATCH_ELEMENTS;

/// Weights of another kind or layout than their averages, which are converted together.
#[derive(Debug, Default)]
struct Converted<'a> {
    averages: Vec<&'a Average>,
    elements: usize,
}

impl Ema {
    /// Lets the averages follow the weights. Call it after every step of the optimizer; the host
    /// does not wait for the device.
    ///
    /// # Errors
    /// When the averages are in the place of the weights, or memory runs out: they are as before
    /// then.
    pub fn update(&mut self) -> Result<()> {
        let scratch = self.prepare()?;
        self.commit(&scratch)
    }

    /// Everything that can fail: the scratch space for weights that are not as their averages.
    pub(crate) fn prepare(&self) -> Result<Vec<Tensor>> {
        match self.own {
            None => scratch_for(&pieces(self.averaged().filter(|average| !average.is_alike()))),
            Some(_) => Err(OptimError::AveragesInPlace.into()),
        }
    }

    /// The update, which allocates nothing.
    pub(crate) fn commit(&mut self, scratch: &[Tensor]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let decay = self.decay_now();
        let alike: Vec<_> = self.averaged().filter(|average| average.is_alike()).collect();
        follow(&alike, &weights(&alike)?, decay)?;
        for piece in pieces(self.averaged().filter(|average| !average.is_alike())) {
            follow(&piece.averages, &convert(&piece, scratch)?, decay)?;
        }
        let copied: Vec<_> = self.averages.iter().filter(|copied| !copied.is_averaged()).collect();
        foreach::copy(&values(&copied), &weights(&copied)?)?;
        self.updates += 1;
        Ok(())
    }

    fn averaged(&self) -> impl Iterator<Item = &Average> {
        self.averages.iter().filter(|average| average.is_averaged())
    }

    /// The decay of the next update.
    fn decay_now(&self) -> f64 {
        let before = self.updates as f64;
        if self.warmup { self.decay.min((1.0 + before) / (10.0 + before)) } else { self.decay }
    }
}

fn follow(averages: &[&Average], weights: &[Tensor], decay: f64) -> Result<()> {
    if averages.is_empty() {
        return Ok(());
    }
    let values = values(averages);
    foreach::scale(&values, decay)?;
    Ok(foreach::add(&values, weights, 1.0 - decay)?)
}

fn values(averages: &[&Average]) -> Vec<Tensor> {
    averages.iter().map(|average| average.value.shallow_clone()).collect()
}

fn weights(averages: &[&Average]) -> Result<Vec<Tensor>> {
    averages.iter().map(|average| Ok(average.variable.f_detach()?)).collect()
}

/// What is converted together: of one kind and device, and of bounded size, or one alone.
fn pieces<'a>(others: impl Iterator<Item = &'a Average>) -> Vec<Converted<'a>> {
    let mut pieces: Vec<Converted<'_>> = Vec::new();
    for average in others {
        let elements = average.value.numel();
        let last = pieces.iter_mut().rev().find(|piece| place(piece.averages[0]) == place(average));
        match last.filter(|piece| piece.elements + elements <= SCRATCH_ELEMENTS) {
            Some(piece) => {
                piece.averages.push(average);
                piece.elements += elements;
            }
            None => pieces.push(Converted { averages: vec![average], elements }),
        }
    }
    pieces
}

fn place(average: &Average) -> (Kind, Device) {
    (average.value.kind(), average.value.device())
}

/// One tensor for each kind and device, of the size that its largest piece needs.
fn scratch_for(pieces: &[Converted<'_>]) -> Result<Vec<Tensor>> {
    let mut scratch: Vec<Tensor> = Vec::new();
    for piece in pieces {
        let (kind, device) = place(piece.averages[0]);
        let known =
            scratch.iter_mut().find(|space| (space.kind(), space.device()) == (kind, device));
        let is_enough = known.as_ref().is_some_and(|space| space.numel() >= piece.elements);
        if is_enough {
            continue;
        }
        let space = Tensor::f_empty([piece.elements as i64], (kind, device))?;
        match known {
            Some(known) => *known = space,
            None => scratch.push(space),
        }
    }
    Ok(scratch)
}

/// The weights in scratch space, laid out as their averages.
fn convert(piece: &Converted<'_>, scratch: &[Tensor]) -> Result<Vec<Tensor>> {
    let (kind, device) = place(piece.averages[0]);
    let space = scratch
        .iter()
        .find(|space| (space.kind(), space.device()) == (kind, device))
        .expect("there is scratch space for every piece");
    let mut start = 0;
    let mut converted = Vec::with_capacity(piece.averages.len());
    for Average { value, .. } in &piece.averages {
        converted.push(space.f_as_strided(value.size(), value.stride(), start)?);
        start += value.numel() as i64;
    }
    foreach::copy(&converted, &weights(&piece.averages)?)?;
    Ok(converted)
}
