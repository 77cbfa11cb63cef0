//! Offloaded stage: the places of its variables and of their optimizer state in host memory and in device buffers.

use std::collections::HashSet;
use std::sync::Arc;

use brimful_torch::host;
use brimful_torch::host_buffer::HostBuffer;
use brimful_torch::stream::Event;
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::accumulate::Sum;
use crate::batch::{Versions, summed_in, tensor_bytes};
use crate::memory::Arena;
use crate::update::OptimizerPart;

/// Alignment of variables in bytes, which is also that of an accelerator's allocator.
const ALIGNMENT: usize = 256;

/// Tensor with a place in a host buffer, and a place in the device buffer to which the host buffer is copied.
#[derive(Debug)]
struct Placed {
    /// Tensor that layers, optimizers and files use; on the host its storage is `on_host`.
    tensor: Tensor,
    on_host: Tensor,
    /// Offset of its bytes in the device buffer.
    offset: usize,
}

/// Offloaded variable.
#[derive(Debug)]
pub(crate) struct OffloadedVariable {
    name: String,
    placed: Placed,
}

/// Optimizer state of an offloaded stage in host memory.
#[derive(Debug)]
struct HostState {
    buffer: HostBuffer,
    /// Bytes of the buffer that are in use.
    end: usize,
    tensors: Vec<Placed>,
}

/// Appends space for this many numbers to a buffer that ends at byte `end`, and returns the offset of the space.
fn after(end: &mut usize, numbers: usize, kind: Kind) -> usize {
    let place = *end;
    *end += aligned_bytes(numbers, kind);
    place
}

/// Offloaded stage, with its host buffers.
#[derive(Debug)]
pub(crate) struct OffloadedStage {
    /// Variables: first the stage's own, in the order of their offsets, then the variables of earlier stages that
    /// it shares.
    variables: Vec<OffloadedVariable>,
    /// Host buffer of the stage's own variables, which are copied in one piece.
    weights: HostBuffer,
    own: usize,
    /// Bytes of a device buffer that this stage needs.
    pub(crate) buffer_bytes: usize,
    /// Optimizer state; none before the first training step with an optimizer.
    state: Option<HostState>,
    /// Events at which the weights, and the state, of the last update have reached the host.
    pub(crate) updated_weights: Option<Arc<Event>>,
    pub(crate) updated_state: Option<Arc<Event>>,
    /// Host buffers of gradients: one for each group of loss terms, more while the gradients of an earlier
    /// step are in use. Frozen parameters take no space.
    gradients: Vec<HostBuffer>,
}

impl OffloadedStage {
    /// Transfers these variables from their device to the host, with this dtype; `shared` variables are already
    /// there.
    pub(crate) fn take_in(
        own: Vec<(String, Tensor)>,
        shared: Vec<OffloadedVariable>,
        kind: Kind,
        memory: &HostMemory,
    ) -> Result<Self> {
        let mut end = 0;
        let mut laid_out = Vec::new();
        for (name, tensor) in own {
            let kind = if tensor.is_floating_point() { kind } else { tensor.kind() };
            laid_out.push((name, after(&mut end, tensor.numel(), kind), kind, tensor));
        }
        let weights = memory.host_buffer(end)?;
        let own = end;
        let mut variables = Vec::new();
        for (name, offset, kind, mut tensor) in laid_out {
            let on_host = view(weights.bytes(), offset, &tensor.size(), kind)?;
            tch::no_grad(|| -> Result<()> {
                on_host.shallow_clone().f_copy_(&tensor)?;
                Ok(tensor.f_set_data(&on_host)?)
            })?;
            variables.push(OffloadedVariable { name, placed: Placed { tensor, on_host, offset } });
        }
        // If the device is the CPU, freed memory of the stage's construction would otherwise stay between
        // the host buffers.
        host::give_freed_back();
        for guest in shared {
            let OffloadedVariable { name, placed } = guest;
            let offset = after(&mut end, placed.tensor.numel(), placed.tensor.kind());
            variables.push(OffloadedVariable { name, placed: Placed { offset, ..placed } });
        }
        Ok(Self {
            variables,
            weights,
            own,
            buffer_bytes: end,
            state: None,
            updated_weights: None,
            updated_state: None,
            gradients: Vec::new(),
        })
    }

    /// Returns the variable of this name, for another stage that shares it.
    pub(crate) fn share(&self, name: &str) -> Option<OffloadedVariable> {
        let Placed { tensor, on_host, offset } =
            &self.variables.iter().find(|variable| variable.name == name)?.placed;
        let (tensor, on_host) = (tensor.shallow_clone(), on_host.shallow_clone());
        let placed = Placed { tensor, on_host, offset: *offset };
        Some(OffloadedVariable { name: name.to_owned(), placed })
    }

    /// Returns whether the variable is one of the stage's own.
    pub(crate) fn owns(&self, name: &str) -> bool {
        self.own().any(|variable| variable.name == name)
    }

    pub(crate) fn is_trained(&self) -> bool {
        self.variables.iter().any(OffloadedVariable::is_trained)
    }

    /// Returns whether the stage has the parameter at this host address.
    pub(crate) fn has(&self, place: usize) -> bool {
        self.variables.iter().any(|variable| variable.place() == place)
    }

    /// Queues copies of all weights into the device buffer, on this thread's stream.
    pub(crate) fn copy_to(&self, buffer: &Tensor) -> Result<()> {
        let own = self.own as i64;
        let here = self.weights.bytes().f_narrow(0, 0, own)?;
        transfer::copy(&buffer.f_narrow(0, 0, own)?, &here)?;
        for guest in self.guests() {
            transfer::copy(&guest.placed.in_buffer(buffer)?, &guest.placed.on_host)?;
        }
        Ok(())
    }

    /// Queues copies of the trained variables in the device buffer to the host, on this thread's stream.
    pub(crate) fn copy_from(&self, buffer: &Tensor) -> Result<u64> {
        if self.own().all(OffloadedVariable::is_trained) {
            let own = self.own as i64;
            let on_host = self.weights.bytes().f_narrow(0, 0, own)?;
            transfer::copy(&on_host, &buffer.f_narrow(0, 0, own)?)?;
            return Ok(self.own as u64);
        }
        let mut bytes = 0;
        for OffloadedVariable { placed, .. } in self.own().filter(|v| v.is_trained()) {
            transfer::copy(&placed.on_host, &placed.in_buffer(buffer)?)?;
            bytes += tensor_bytes(&placed.on_host);
        }
        Ok(bytes)
    }

    /// Returns the bytes that a fetch copies.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.own as u64
            + self.guests().map(|guest| tensor_bytes(&guest.placed.on_host)).sum::<u64>()
    }

    /// Returns the stage's own variables.
    fn own(&self) -> impl Iterator<Item = &OffloadedVariable> {
        self.variables.iter().filter(|variable| variable.placed.offset < self.own)
    }

    /// Returns the variables that an earlier stage owns.
    fn guests(&self) -> impl Iterator<Item = &OffloadedVariable> {
        self.variables.iter().filter(|variable| variable.placed.offset >= self.own)
    }

    /// Returns the names of the trained variables that an earlier stage owns.
    pub(crate) fn trained_guests(&self) -> impl Iterator<Item = &str> {
        self.guests().filter(|guest| guest.is_trained()).map(|guest| guest.name.as_str())
    }

    /// Returns whether the stage owns and trains all of its variables. Only then is the device buffer equal to the
    /// host's weights after every update.
    pub(crate) fn is_alone(&self) -> bool {
        self.guests().next().is_none() && self.own().all(OffloadedVariable::is_trained)
    }

    /// Returns the versions of the weights.
    pub(crate) fn versions(&self) -> Versions {
        Versions::of(self.tensors())
    }

    /// Returns whether weights have changed since they had these versions.
    pub(crate) fn has_changed(&self, versions: &Versions) -> bool {
        versions.changed(self.tensors()).is_some()
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.variables.iter().map(|variable| &variable.placed.tensor)
    }

    /// Returns the versions of the optimizer's state.
    pub(crate) fn state_versions(&self) -> Versions {
        Versions::of(self.state_tensors())
    }

    /// Returns whether the optimizer's state has changed since it had these versions.
    pub(crate) fn has_changed_state(&self, versions: &Versions) -> bool {
        versions.changed(self.state_tensors()).is_some()
    }

    fn state_tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().flat_map(|state| &state.tensors).map(|placed| &placed.tensor)
    }

    /// Points the variables to the device buffer.
    pub(crate) fn point_to(&self, buffer: &Tensor) -> Result<()> {
        self.variables.iter().try_for_each(|variable| variable.placed.point_to(buffer))
    }

    /// Points the variables that are in this device buffer back to the host.
    pub(crate) fn leave(&self, buffer: &Tensor) -> Result<()> {
        self.variables.iter().try_for_each(|variable| variable.placed.leave(buffer))
    }

    /// Returns whether all of the optimizer's state of this part is in the stage's host buffer.
    pub(crate) fn has_state(&self, part: usize, optimizer: &OptimizerPart) -> bool {
        let tensors = self.state.iter().flat_map(|state| &state.tensors);
        let held: HashSet<_> = tensors.map(|placed| placed.on_host.data_ptr()).collect();
        optimizer.has_states(part, |tensor| held.contains(&tensor.data_ptr()))
    }

    /// Makes the optimizer's state of this part in a host buffer of the stage, unless all of it is there.
    pub(crate) fn hold_state(
        &mut self,
        part: usize,
        optimizer: &mut OptimizerPart,
        memory: &HostMemory,
    ) -> Result<()> {
        if self.has_state(part, optimizer) {
            return Ok(());
        }
        // An update in flight still writes to the old buffer.
        if let Some(updated) = &self.updated_state {
            updated.synchronize()?;
        }
        let bytes = optimizer.state_bytes(part, ALIGNMENT) as usize;
        let buffer = memory.host_buffer(bytes)?;
        let mut state = HostState { buffer, end: 0, tensors: Vec::new() };
        let made = optimizer.make_states(Some(part), |tensor| state.place(tensor));
        // Kept even after a failure, because some tensors are in the buffer already.
        self.state = Some(state);
        host::give_freed_back();
        made
    }

    /// Drops the optimizer's state.
    pub(crate) fn forget_state(&mut self) {
        self.state = None;
    }

    /// Returns the bytes of a device buffer for the optimizer's state.
    pub(crate) fn state_bytes(&self) -> usize {
        self.state.as_ref().map_or(0, |state| state.end)
    }

    /// Returns the bytes of a device buffer for the gradients of the stage's own variables, in this dtype if
    /// it is given.
    pub(crate) fn gradient_bytes(&self, kind: Option<Kind>) -> usize {
        let trained = self.own().filter(|variable| variable.is_trained());
        let bytes = trained.map(|OffloadedVariable { placed, .. }| {
            let kind = kind.unwrap_or(summed_in(placed.on_host.kind()));
            aligned_bytes(placed.on_host.numel(), kind)
        });
        bytes.sum()
    }

    /// Returns the bytes of a device buffer for the optimizer's state and these gradients.
    pub(crate) fn state_bytes_with(&self, gradients: &[Tensor]) -> usize {
        let bytes =
            gradients.iter().map(|gradient| aligned_bytes(gradient.numel(), gradient.kind()));
        self.state_bytes() + bytes.sum::<usize>()
    }

    /// Queues a copy of the optimizer's state into the device buffer, on this thread's stream.
    pub(crate) fn copy_state_to(&self, buffer: &Tensor) -> Result<u64> {
        let Some(state) = &self.state else { return Ok(0) };
        let used = state.end as i64;
        let on_host = state.buffer.bytes().f_narrow(0, 0, used)?;
        transfer::copy(&buffer.f_narrow(0, 0, used)?, &on_host)?;
        Ok(state.end as u64)
    }

    /// Queues copies of these gradients into the device buffer, after the state, on this thread's stream.
    pub(crate) fn copy_gradients_to(&self, buffer: &Tensor, gradients: &[Tensor]) -> Result<u64> {
        for (there, gradient) in self.gradients_in(buffer, gradients)?.iter().zip(gradients) {
            transfer::copy(there, gradient)?;
        }
        Ok(gradients.iter().map(tensor_bytes).sum())
    }

    /// Returns the places of these gradients in the device buffer, after the state.
    pub(crate) fn gradients_in(
        &self,
        buffer: &Tensor,
        gradients: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let mut end = self.state_bytes();
        let mut place = |gradient: &Tensor| {
            let start = after(&mut end, gradient.numel(), gradient.kind());
            view(buffer, start, &gradient.size(), gradient.kind())
        };
        gradients.iter().map(&mut place).collect()
    }

    /// Queues copies of the optimizer's state in the device buffer to the host, on this thread's stream.
    pub(crate) fn copy_state_from(&self, buffer: &Tensor) -> Result<u64> {
        let Some(state) = &self.state else { return Ok(0) };
        let used = state.end as i64;
        let on_host = state.buffer.bytes().f_narrow(0, 0, used)?;
        transfer::copy(&on_host, &buffer.f_narrow(0, 0, used)?)?;
        Ok(state.end as u64)
    }

    /// Points the optimizer's state to the device buffer; without a buffer, to the host.
    pub(crate) fn point_state_to(&self, buffer: Option<&Tensor>) -> Result<()> {
        let mut tensors = self.state.iter().flat_map(|state| &state.tensors);
        tensors.try_for_each(|placed| match buffer {
            Some(buffer) => placed.point_to(buffer),
            None => placed.set(&placed.on_host),
        })
    }

    /// Queues copies of these gradients, by parameter, to host memory, on this thread's stream. `place_of`
    /// holds the parameters' host addresses.
    pub(crate) fn copy_to_host(
        &mut self,
        sums: &Sum,
        place_of: &[usize],
        memory: &HostMemory,
    ) -> Result<Sum> {
        let needed = sums.iter().zip(place_of).filter(|(_, place)| self.has(**place));
        let needed = needed.filter_map(|(sum, _)| sum.as_ref());
        let needed: usize = needed.map(|sum| aligned_bytes(sum.numel(), sum.kind())).sum();
        if needed == 0 {
            return Ok(sums.iter().map(|_| None).collect());
        }
        let at = self.free_gradients(needed, memory)?;
        let buffer = self.gradients[at].bytes();
        let mut on_host = Vec::with_capacity(sums.len());
        let mut end = 0;
        for (sum, place) in sums.iter().zip(place_of) {
            let copy = match sum {
                Some(sum) if self.has(*place) => {
                    let start = after(&mut end, sum.numel(), sum.kind());
                    let copy = view(buffer, start, &sum.size(), sum.kind())?;
                    transfer::copy(&copy, sum)?;
                    Some(copy)
                }
                _ => None,
            };
            on_host.push(copy);
        }
        Ok(on_host)
    }

    /// Returns the gradients of the stage's own variables by name, with the gradients that later stages left
    /// for them in `shared`. Leaves the gradients of variables that an earlier stage owns in `shared`.
    pub(crate) fn named(
        &self,
        gradients: &[Sum],
        places: &[usize],
        shared: &mut Vec<(String, Tensor)>,
    ) -> Vec<(String, Vec<Tensor>)> {
        let named =
            gradients.iter().flat_map(|sum| sum.iter().zip(places)).filter_map(|(sum, place)| {
                let variable = self.variables.iter().find(|variable| variable.place() == *place);
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

    /// Returns the index of a free gradient buffer of at least this many bytes; allocates one if there is none.
    fn free_gradients(&mut self, bytes: usize, memory: &HostMemory) -> Result<usize> {
        for (at, buffer) in self.gradients.iter().enumerate() {
            if buffer.bytes().numel() >= bytes && buffer.is_free() {
                return Ok(at);
            }
        }
        self.gradients.push(memory.host_buffer(bytes)?);
        Ok(self.gradients.len() - 1)
    }
}

impl OffloadedVariable {
    fn is_trained(&self) -> bool {
        self.placed.tensor.requires_grad()
    }

    /// Returns the variable's host address.
    fn place(&self) -> usize {
        self.placed.on_host.data_ptr() as usize
    }
}

impl HostState {
    /// Moves a tensor, which is contiguous, into the buffer.
    fn place(&mut self, tensor: &Tensor) -> Result<()> {
        let (tensor, kind) = (tensor.shallow_clone(), tensor.kind());
        let offset = after(&mut self.end, tensor.numel(), kind);
        let on_host = view(self.buffer.bytes(), offset, &tensor.size(), kind)?;
        on_host.shallow_clone().f_copy_(&tensor)?;
        let placed = Placed { tensor, on_host, offset };
        placed.set(&placed.on_host)?;
        self.tensors.push(placed);
        Ok(())
    }
}

impl Placed {
    fn in_buffer(&self, buffer: &Tensor) -> Result<Tensor> {
        view(buffer, self.offset, &self.on_host.size(), self.on_host.kind())
    }

    fn point_to(&self, buffer: &Tensor) -> Result<()> {
        self.set(&self.in_buffer(buffer)?)
    }

    /// Points the tensor back to the host, unless it is in another stage's device buffer by now.
    fn leave(&self, buffer: &Tensor) -> Result<()> {
        match self.tensor.data_ptr() == self.in_buffer(buffer)?.data_ptr() {
            true => self.set(&self.on_host),
            false => Ok(()),
        }
    }

    fn set(&self, storage: &Tensor) -> Result<()> {
        tch::no_grad(|| Ok(self.tensor.shallow_clone().f_set_data(storage)?))
    }
}

/// Host memory of offloaded stages.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// Arena that host buffers are charged to, if any.
    pub(crate) arena: Option<Arena>,
    pub(crate) device: Device,
}

impl HostMemory {
    /// Allocates a host buffer, pinned for an accelerator if the system allows it.
    fn host_buffer(&self, bytes: usize) -> Result<HostBuffer> {
        let _charged = self.arena.as_ref().map(Arena::enter);
        let mut buffer = HostBuffer::new(bytes)?;
        if self.device != Device::Cpu
            && let Err(refusal) = buffer.pin(self.device)
        {
            // Only a warning: copies work without pinned memory too, but take about nine times as long.
            tracing::warn!(
                bytes,
                "the system locks no more pages, so copies between host and device will be slow \
                 (raise the limit of locked memory: ulimit -l): {refusal}"
            );
        }
        Ok(buffer)
    }
}

/// Returns the bytes of this many numbers, rounded up to the alignment.
fn aligned_bytes(numbers: usize, kind: Kind) -> usize {
    (numbers * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}

/// Returns a tensor of this shape and dtype that begins at this byte.
fn view(bytes: &Tensor, start: usize, shape: &[i64], kind: Kind) -> Result<Tensor> {
    let numbers = shape.iter().product::<i64>();
    let length = numbers * kind.elt_size_in_bytes() as i64;
    let bytes = bytes.f_narrow(0, start as i64, length)?;
    Ok(bytes.f_view_dtype(kind)?.f_view(shape)?)
}
