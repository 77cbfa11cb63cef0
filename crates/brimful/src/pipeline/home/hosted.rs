//! A stage that lives on the host: its variables' places at home, in a slot, and among gradients.

use brimful_torch::host;
use brimful_torch::slab::Slab;
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::accumulate::Sum;
use crate::batch::tensor_bytes;
use crate::memory::Arena;

/// Variables begin at multiples of 256 bytes, as what an accelerator's allocator gives does.
const ALIGNMENT: usize = 256;

/// A variable that lives on the host.
#[derive(Debug)]
pub(crate) struct HostedVariable {
    name: String,
    /// The one that layers, optimizers and files know: at home its numbers are `at_home`.
    tensor: Tensor,
    at_home: Tensor,
    /// Where its bytes begin in its stage's slot.
    in_slot: usize,
}

/// Makes room for so many numbers behind the others, which end at this byte, and gives the place.
fn after(end: &mut usize, numbers: usize, kind: Kind) -> usize {
    let place = *end;
    *end += room(numbers, kind);
    place
}

/// A stage's part of the host's memory.
#[derive(Debug)]
pub(crate) struct HostedStage {
    /// Its own first, in the order of their bytes; then those that it shares with an earlier stage.
    variables: Vec<HostedVariable>,
    /// Of its own variables, which cross in one piece.
    weights: Slab,
    own: usize,
    /// What a slot must hold.
    pub(crate) slot_bytes: usize,
    /// One a group of loss terms; more where somebody keeps the gradients of an earlier step. Each is as large
    /// as what is trained: of what is frozen nothing comes.
    gradients: Vec<Slab>,
}

impl HostedStage {
    /// Brings these variables, which are on their device, home, as numbers of this kind; `shared` ones
    /// have a home already.
    pub(crate) fn take_in(
        own: Vec<(String, Tensor)>,
        shared: Vec<HostedVariable>,
        kind: Kind,
        memory: &HomeMemory,
    ) -> Result<Self> {
        let mut end = 0;
        let mut laid_out = Vec::new();
        for (name, tensor) in own {
            let kind = if tensor.is_floating_point() { kind } else { tensor.kind() };
            laid_out.push((name, after(&mut end, tensor.numel(), kind), kind, tensor));
        }
        let weights = memory.slab(end)?;
        let own = end;
        let mut variables = Vec::new();
        for (name, in_slot, kind, mut tensor) in laid_out {
            let at_home = view(weights.bytes(), in_slot, &tensor.size(), kind)?;
            tch::no_grad(|| -> Result<()> {
                at_home.shallow_clone().f_copy_(&tensor)?;
                Ok(tensor.f_set_data(&at_home)?)
            })?;
            variables.push(HostedVariable { name, tensor, at_home, in_slot });
        }
        // Where the device is the host itself, what the stage was built in would stay between the homes.
        host::give_freed_back();
        for guest in shared {
            let in_slot = after(&mut end, guest.tensor.numel(), guest.tensor.kind());
            variables.push(HostedVariable { in_slot, ..guest });
        }
        Ok(Self { variables, weights, own, slot_bytes: end, gradients: Vec::new() })
    }

    /// The variable of this name, for another stage that shares it.
    pub(crate) fn share(&self, name: &str) -> Option<HostedVariable> {
        let variable = self.variables.iter().find(|variable| variable.name == name)?;
        Some(HostedVariable {
            name: name.to_owned(),
            tensor: variable.tensor.shallow_clone(),
            at_home: variable.at_home.shallow_clone(),
            ..*variable
        })
    }

    /// Whether the variable's home is here.
    pub(crate) fn owns(&self, name: &str) -> bool {
        self.variables.iter().any(|variable| variable.name == name && variable.in_slot < self.own)
    }

    pub(crate) fn is_trained(&self) -> bool {
        self.variables.iter().any(|variable| variable.tensor.requires_grad())
    }

    /// Whether it has this parameter.
    pub(crate) fn has(&self, place: usize) -> bool {
        self.variables.iter().any(|variable| variable.at_home.data_ptr() as usize == place)
    }

    /// Queues copies of all weights into the slot, on this thread's stream.
    pub(crate) fn copy_to(&self, slot: &Tensor) -> Result<()> {
        let own = self.own as i64;
        let here = self.weights.bytes().f_narrow(0, 0, own)?;
        transfer::copy(&slot.f_narrow(0, 0, own)?, &here)?;
        for guest in self.guests() {
            transfer::copy(&guest.in_slot(slot)?, &guest.at_home)?;
        }
        Ok(())
    }

    /// What these copies take over the bus.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.own as u64 + self.guests().map(|guest| tensor_bytes(&guest.at_home)).sum::<u64>()
    }

    /// The variables that it shares with an earlier stage, whose home is there.
    fn guests(&self) -> impl Iterator<Item = &HostedVariable> {
        self.variables.iter().filter(|variable| variable.in_slot >= self.own)
    }

    /// The names of those that are trained.
    pub(crate) fn trained_guests(&self) -> impl Iterator<Item = &str> {
        self.guests().filter(|guest| guest.tensor.requires_grad()).map(|guest| guest.name.as_str())
    }

    /// Lets the variables be what is in the slot.
    pub(crate) fn point_to(&self, slot: &Tensor) -> Result<()> {
        tch::no_grad(|| {
            let mut all = self.variables.iter();
            all.try_for_each(|v| Ok(v.tensor.shallow_clone().f_set_data(&v.in_slot(slot)?)?))
        })
    }

    /// Lets the variables that are in this slot be what is at home.
    pub(crate) fn leave(&self, slot: &Tensor) -> Result<()> {
        tch::no_grad(|| {
            for variable in &self.variables {
                // A shared one may be in another stage's slot by now.
                if variable.tensor.data_ptr() == variable.in_slot(slot)?.data_ptr() {
                    variable.tensor.shallow_clone().f_set_data(&variable.at_home)?;
                }
            }
            Ok(())
        })
    }

    /// Queues copies of these sums, by parameter, into memory at home, on this thread's stream.
    /// `place_of` gives a parameter's place at home.
    pub(crate) fn bring_home(
        &mut self,
        sums: &Sum,
        place_of: &[usize],
        memory: &HomeMemory,
    ) -> Result<Sum> {
        let needed = sums.iter().zip(place_of).filter(|(_, place)| self.has(**place));
        let needed = needed.filter_map(|(sum, _)| sum.as_ref());
        let needed: usize = needed.map(|sum| room(sum.numel(), sum.kind())).sum();
        if needed == 0 {
            return Ok(sums.iter().map(|_| None).collect());
        }
        let at = self.free_gradients(needed, memory)?;
        let slab = self.gradients[at].bytes();
        let mut home = Vec::with_capacity(sums.len());
        let mut end = 0;
        for (sum, place) in sums.iter().zip(place_of) {
            let room = match sum {
                Some(sum) if self.has(*place) => {
                    let start = after(&mut end, sum.numel(), sum.kind());
                    let room = view(slab, start, &sum.size(), sum.kind())?;
                    transfer::copy(&room, sum)?;
                    Some(room)
                }
                _ => None,
            };
            home.push(room);
        }
        Ok(home)
    }

    /// The sums at home, by group and parameter, under the names of the stage's own variables, together
    /// with what later stages have left in `shared` of them; those of variables that an earlier stage
    /// owns are left there.
    pub(crate) fn named(
        &self,
        home: &[Sum],
        places: &[usize],
        shared: &mut Vec<(String, Tensor)>,
    ) -> Vec<(String, Vec<Tensor>)> {
        let named =
            home.iter().flat_map(|sum| sum.iter().zip(places)).filter_map(|(sum, place)| {
                let variable =
                    self.variables.iter().find(|v| v.at_home.data_ptr() as usize == *place);
                Some((variable?.name.clone(), sum.as_ref()?.shallow_clone()))
            });
        let (mut all, of_guests): (Vec<_>, Vec<_>) = named.partition(|(name, _)| self.owns(name));
        all.extend(shared.extract_if(.., |(name, _)| self.owns(name)));
        shared.extend(of_guests);
        let mut own: Vec<(String, Vec<Tensor>)> = Vec::new();
        for (name, sum) in all {
            match own.iter_mut().find(|(own, _)| *own == name) {
                Some((_, parts)) => parts.push(sum),
                None => own.push((name, vec![sum])),
            }
        }
        own
    }

    /// The place of a slab of so many bytes that nobody looks at: gradients of an earlier step may be in use.
    fn free_gradients(&mut self, bytes: usize, memory: &HomeMemory) -> Result<usize> {
        for (at, slab) in self.gradients.iter().enumerate() {
            if slab.bytes().numel() >= bytes && slab.is_free() {
                return Ok(at);
            }
        }
        self.gradients.push(memory.slab(bytes)?);
        Ok(self.gradients.len() - 1)
    }
}

impl HostedVariable {
    fn in_slot(&self, slot: &Tensor) -> Result<Tensor> {
        view(slot, self.in_slot, &self.at_home.size(), self.at_home.kind())
    }
}

/// Where homes are made.
#[derive(Debug)]
pub(crate) struct HomeMemory {
    /// What they are charged to; none where the device's own account does not see the host's memory.
    pub(crate) arena: Option<Arena>,
    pub(crate) device: Device,
}

impl HomeMemory {
    /// So many bytes, page-locked for an accelerator where the system allows it.
    fn slab(&self, bytes: usize) -> Result<Slab> {
        let _charged = self.arena.as_ref().map(Arena::enter);
        let mut slab = Slab::new(bytes)?;
        if self.device != Device::Cpu
            && let Err(refusal) = slab.lock(self.device)
        {
            // It works all the same; said, because copies then take about nine times as long.
            tracing::warn!(
                bytes,
                "the system locks no more pages, so copies between host and device will be slow \
                 (raise the limit of locked memory: ulimit -l): {refusal}"
            );
        }
        Ok(slab)
    }
}

/// Bytes of so many numbers, up to where the next ones may begin.
fn room(numbers: usize, kind: Kind) -> usize {
    (numbers * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}

/// A tensor of this shape and kind that begins at this byte.
fn view(bytes: &Tensor, start: usize, shape: &[i64], kind: Kind) -> Result<Tensor> {
    let numbers = shape.iter().product::<i64>();
    let length = numbers * kind.elt_size_in_bytes() as i64;
    let bytes = bytes.f_narrow(0, start as i64, length)?;
    Ok(bytes.f_view_dtype(kind)?.f_view(shape)?)
}
