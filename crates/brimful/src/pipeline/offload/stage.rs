//! Offloaded stage: the places of its variables in host memory, in a device buffer, and among gradients.

use brimful_torch::host;
use brimful_torch::host_buffer::HostBuffer;
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::accumulate::Sum;
use crate::batch::tensor_bytes;
use crate::memory::Arena;

/// Alignment of variables in bytes, which is also that of an accelerator's allocator.
const ALIGNMENT: usize = 256;

/// Offloaded variable.
#[derive(Debug)]
pub(crate) struct OffloadedVariable {
    name: String,
    /// Tensor that layers, optimizers and files use; on the host its storage is `on_host`.
    tensor: Tensor,
    on_host: Tensor,
    /// Offset of its bytes in its stage's device buffer.
    offset: usize,
}

/// Appends so many numbers to a buffer that ends at this byte, and returns their offset.
fn after(end: &mut usize, numbers: usize, kind: Kind) -> usize {
    let place = *end;
    *end += aligned_bytes(numbers, kind);
    place
}

/// Offloaded stage, with its host buffers.
#[derive(Debug)]
pub(crate) struct OffloadedStage {
    /// The stage's own variables first, in the order of their offsets; then those that it shares with an
    /// earlier stage.
    variables: Vec<OffloadedVariable>,
    /// Host buffer of the stage's own variables, which are copied in one piece.
    weights: HostBuffer,
    own: usize,
    /// Bytes of a device buffer that this stage needs.
    pub(crate) buffer_bytes: usize,
    /// Host buffers of gradients: one a group of loss terms, more while the gradients of an earlier step
    /// are in use. Frozen parameters take no space.
    gradients: Vec<HostBuffer>,
}

impl OffloadedStage {
    /// Transfers these variables from their device to the host, with this dtype; `shared` ones are already
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
            variables.push(OffloadedVariable { name, tensor, on_host, offset });
        }
        // If the device is the CPU, freed memory of the stage's construction would otherwise stay between
        // the host buffers.
        host::give_freed_back();
        for guest in shared {
            let offset = after(&mut end, guest.tensor.numel(), guest.tensor.kind());
            variables.push(OffloadedVariable { offset, ..guest });
        }
        Ok(Self { variables, weights, own, buffer_bytes: end, gradients: Vec::new() })
    }

    /// Returns the variable of this name, for another stage that shares it.
    pub(crate) fn share(&self, name: &str) -> Option<OffloadedVariable> {
        let variable = self.variables.iter().find(|variable| variable.name == name)?;
        Some(OffloadedVariable {
            name: name.to_owned(),
            tensor: variable.tensor.shallow_clone(),
            on_host: variable.on_host.shallow_clone(),
            ..*variable
        })
    }

    /// Returns whether the variable is one of the stage's own.
    pub(crate) fn owns(&self, name: &str) -> bool {
        self.variables.iter().any(|variable| variable.name == name && variable.offset < self.own)
    }

    pub(crate) fn is_trained(&self) -> bool {
        self.variables.iter().any(|variable| variable.tensor.requires_grad())
    }

    /// Returns whether the stage has the parameter at this host address.
    pub(crate) fn has(&self, place: usize) -> bool {
        self.variables.iter().any(|variable| variable.on_host.data_ptr() as usize == place)
    }

    /// Queues copies of all weights into the device buffer, on this thread's stream.
    pub(crate) fn copy_to(&self, buffer: &Tensor) -> Result<()> {
        let own = self.own as i64;
        let here = self.weights.bytes().f_narrow(0, 0, own)?;
        transfer::copy(&buffer.f_narrow(0, 0, own)?, &here)?;
        for guest in self.guests() {
            transfer::copy(&guest.in_buffer(buffer)?, &guest.on_host)?;
        }
        Ok(())
    }

    /// Bytes of these copies.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.own as u64 + self.guests().map(|guest| tensor_bytes(&guest.on_host)).sum::<u64>()
    }

    /// Returns the variables that an earlier stage owns.
    fn guests(&self) -> impl Iterator<Item = &OffloadedVariable> {
        self.variables.iter().filter(|variable| variable.offset >= self.own)
    }

    /// Returns the names of the trained variables that an earlier stage owns.
    pub(crate) fn trained_guests(&self) -> impl Iterator<Item = &str> {
        self.guests().filter(|guest| guest.tensor.requires_grad()).map(|guest| guest.name.as_str())
    }

    /// Points the variables to the device buffer.
    pub(crate) fn point_to(&self, buffer: &Tensor) -> Result<()> {
        tch::no_grad(|| {
            let mut all = self.variables.iter();
            all.try_for_each(|v| Ok(v.tensor.shallow_clone().f_set_data(&v.in_buffer(buffer)?)?))
        })
    }

    /// Points the variables that are in this device buffer back to the host.
    pub(crate) fn leave(&self, buffer: &Tensor) -> Result<()> {
        tch::no_grad(|| {
            for variable in &self.variables {
                // A shared variable may already be in another stage's device buffer.
                if variable.tensor.data_ptr() == variable.in_buffer(buffer)?.data_ptr() {
                    variable.tensor.shallow_clone().f_set_data(&variable.on_host)?;
                }
            }
            Ok(())
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

    /// Returns the gradients on the host under the names of the stage's own variables, together with those
    /// that later stages left in `shared`. Leaves the gradients of variables that an earlier stage owns in
    /// `shared`.
    pub(crate) fn named(
        &self,
        on_host: &[Sum],
        places: &[usize],
        shared: &mut Vec<(String, Tensor)>,
    ) -> Vec<(String, Vec<Tensor>)> {
        let named =
            on_host.iter().flat_map(|sum| sum.iter().zip(places)).filter_map(|(sum, place)| {
                let variable =
                    self.variables.iter().find(|v| v.on_host.data_ptr() as usize == *place);
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

    /// Returns the index of a free gradient buffer of at least so many bytes: those of an earlier step may
    /// be in use.
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
    fn in_buffer(&self, buffer: &Tensor) -> Result<Tensor> {
        view(buffer, self.offset, &self.on_host.size(), self.on_host.kind())
    }
}

/// Host memory of offloaded stages.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// Arena that it is charged to; none if the device's own arena does not count host memory.
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
            // Works unpinned too; a warning, because copies then take about nine times as long.
            tracing::warn!(
                bytes,
                "the system locks no more pages, so copies between host and device will be slow \
                 (raise the limit of locked memory: ulimit -l): {refusal}"
            );
        }
        Ok(buffer)
    }
}

/// Bytes of so many numbers, rounded up to the alignment.
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
