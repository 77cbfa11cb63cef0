//! Buckets of gradients of some megabytes, each summed over the ranks as soon as it is full.
//!
//! Backward completes gradients in about the reverse order of the parameters, so buckets are filled in that
//! order. They have the dtype of the sums: f32 for parameters in half precision.

use tch::{Device, Kind, Tensor};

use super::RankSum;
use super::host_copier::HostCopier;
use crate::batch::summed_in;
use crate::world::Summing;
use crate::{Error, Result};

/// Size of a bucket, unless one parameter alone has more: small enough to be sent early, large enough that a
/// message's latency does not matter.
const BUCKET_BYTES: usize = 4 << 20;

/// Gradients of all parameters, in buckets that are being summed over the ranks.
#[derive(Debug)]
pub(crate) struct Buckets {
    collective: RankSum,
    copier: HostCopier,
    buckets: Vec<Bucket>,
    /// Place of each parameter's gradient.
    places: Vec<BucketPlace>,
    /// First error in a backward, kept until it can be reported.
    failed: Option<Error>,
}

#[derive(Debug)]
struct Bucket {
    numbers: Tensor,
    /// Number of parameters whose gradients are not in the bucket yet.
    missing: usize,
    summing: Option<Summing>,
}

#[derive(Debug)]
struct BucketPlace {
    bucket: usize,
    start: usize,
    shape: Vec<i64>,
    filled: bool,
}

impl Buckets {
    pub(crate) fn new(collective: RankSum, parameters: &[Tensor]) -> Result<Self> {
        let mut outlines: Vec<(Kind, usize, usize)> = Vec::new();
        let mut places = Vec::with_capacity(parameters.len());
        for parameter in parameters.iter().rev() {
            let kind = summed_in(parameter.kind());
            let length = parameter.numel();
            let fits = |(other, numbers, _): &(Kind, usize, usize)| {
                *other == kind && (numbers + length) * kind.elt_size_in_bytes() <= BUCKET_BYTES
            };
            if !outlines.last().is_some_and(fits) {
                outlines.push((kind, 0, 0));
            }
            let bucket = outlines.len() - 1;
            let (_, numbers, missing) = &mut outlines[bucket];
            places.push(BucketPlace {
                bucket,
                start: *numbers,
                shape: parameter.size(),
                filled: false,
            });
            *numbers += length;
            *missing += 1;
        }
        places.reverse();
        let copier = HostCopier::new(parameters.first().map_or(Device::Cpu, Tensor::device))?;
        let bucket = |(kind, numbers, missing): (Kind, usize, usize)| {
            Ok(Bucket { numbers: copier.host_memory(numbers, kind)?, missing, summing: None })
        };
        let buckets = outlines.into_iter().map(bucket).collect::<Result<_>>()?;
        Ok(Self { collective, copier, buckets, places, failed: None })
    }

    /// Adds a parameter's complete gradient. Backward calls it, so errors are reported later.
    pub(crate) fn arrived(&mut self, parameter: usize, gradient: &Tensor) {
        if self.failed.is_none() {
            self.failed = self.put(parameter, Some(gradient)).err();
        }
    }

    /// Adds the gradients that have not arrived, and zeros for parameters without a gradient.
    pub(crate) fn fill(&mut self, gradients: &[Option<Tensor>]) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        for parameter in 0..self.places.len() {
            if !self.places[parameter].filled {
                self.put(parameter, gradients.get(parameter).and_then(Option::as_ref))?;
            }
        }
        Ok(())
    }

    fn put(&mut self, parameter: usize, gradient: Option<&Tensor>) -> Result<()> {
        let mut into = self.part(parameter)?;
        match gradient {
            Some(gradient) => self.copier.bring(gradient, &into)?,
            // Sent as zeros, because other ranks may have a gradient for this parameter, and a bucket must have
            // the same size on all ranks.
            None => drop(into.f_zero_()?),
        }
        let place = &mut self.places[parameter];
        if std::mem::replace(&mut place.filled, true) {
            let twice = "a parameter was reached twice in one backward, as by a backward within it";
            return Err(Error::Torch(twice.into()));
        }
        let bucket = &mut self.buckets[place.bucket];
        bucket.missing -= 1;
        if bucket.missing == 0 {
            // The sum begins when the copy is complete; the backward waits for neither.
            let ready = self.copier.completion()?;
            bucket.summing = Some(self.collective.sum(place.bucket, &bucket.numbers, ready)?);
        }
        Ok(())
    }

    /// Returns the memory of a parameter's gradient.
    fn part(&self, parameter: usize) -> Result<Tensor> {
        let BucketPlace { bucket, start, shape, .. } = &self.places[parameter];
        let length = shape.iter().product();
        let numbers = &self.buckets[*bucket].numbers;
        Ok(numbers.f_narrow(0, *start as i64, length)?.f_view(&shape[..])?)
    }

    /// Waits until the gradients of all ranks are summed, and returns the sum of each parameter.
    pub(crate) fn summed(mut self) -> Result<Vec<Tensor>> {
        for bucket in &mut self.buckets {
            if let Some(summing) = bucket.summing.take() {
                summing.wait()?;
            }
        }
        (0..self.places.len()).map(|parameter| self.part(parameter)).collect()
    }
}
