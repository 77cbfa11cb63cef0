//! Sums the replicas' gradients, in their order; each thread sums a part of the parameters.
//!
//! Every sum is ((g₀ + g₁) + g₂) …, whatever thread computes it and whenever, so the result depends only on
//! the parts. Each gradient is read once, and on a CPU nothing is allocated.

use brimful_torch::foreach;

use super::replica::Replica;
use crate::Result;
use crate::accumulate::Addends;
use crate::workers::Workers;

/// Adds to every sum its addends, in the replicas' order.
pub(super) fn reduce<M: 'static>(
    workers: &Workers<Replica<M>>,
    addends: Vec<Addends>,
) -> Result<()> {
    let addends: Vec<_> = addends.into_iter().filter(|sum| !sum.what.is_empty()).collect();
    if addends.is_empty() {
        return Ok(());
    }
    workers.each_or_error(dealt(addends, workers.len()), |_, addends| add(addends)).map(drop)
}

/// Divides the sums into this many parts with nearly equal numbers of elements.
fn dealt(mut addends: Vec<Addends>, parts: usize) -> Vec<Vec<Addends>> {
    // The largest first, each to the part with the fewest elements so far: one embedding may be half of all.
    addends.sort_by_key(|sum| std::cmp::Reverse(sum.into.numel()));
    let mut dealt: Vec<(usize, Vec<Addends>)> = (0..parts).map(|_| (0, Vec::new())).collect();
    for sum in addends {
        let lightest = dealt.iter_mut().min_by_key(|(elements, _)| *elements);
        let (elements, part) = lightest.expect("there is a replica");
        *elements += sum.into.numel();
        part.push(sum);
    }
    dealt.into_iter().map(|(_, part)| part).collect()
}

fn add(addends: Vec<Addends>) -> Result<()> {
    let _without = tch::no_grad_guard();
    let longest = addends.iter().map(|sum| sum.what.len()).max().unwrap_or(0);
    for collective in 0..longest {
        // Replicas are added in their order, so the bits of the sum do not depend on which replica finishes first.
        let mut into = Vec::new();
        let mut what = Vec::new();
        for sum in &addends {
            let Some(new) = sum.what.get(collective) else { continue };
            into.push(sum.into.shallow_clone());
            what.push(new.f_to_device(sum.into.device())?);
        }
        foreach::add(&into, &what, 1.0)?;
    }
    Ok(())
}
