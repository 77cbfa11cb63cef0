//! Rules for layers' names (complete, unique, never inside each other), and what they refer to.

use std::collections::HashMap;

use super::LayersError;
use super::description::Description;
use super::skips::Skip;
use crate::Result;

/// Checks all names of a list, in order.
pub(super) fn check(list: &[Description]) -> Result<()> {
    let mut positions = HashMap::new();
    for (position, layer) in list.iter().enumerate() {
        let name = layer.name.as_str();
        if name.split('.').any(str::is_empty) {
            return Err(LayersError::Name { position, name: name.into() }.into());
        }
        if let Some(&first) = positions.get(name) {
            return Err(LayersError::Twice { name: name.into(), first, second: position }.into());
        }
        if let Some(owner) = layer.shares.clone().filter(|owner| !positions.contains_key(&**owner))
        {
            return Err(LayersError::Shares { position, name: name.into(), owner }.into());
        }
        positions.insert(name, position);
    }
    check_nesting(list, &positions)
}

/// Returns the pairs (user, owner) of a list whose names have been checked.
pub(super) fn shared(list: &[Description]) -> Vec<(usize, usize)> {
    let position = |name: &String| list.iter().position(|layer| layer.name == *name);
    let users = list.iter().enumerate();
    users.filter_map(|(i, layer)| Some((i, position(layer.shares.as_ref()?)?))).collect()
}

/// Returns the skip connections of a list whose names have been checked: every stash with its pops.
pub(super) fn skips(list: &[Description]) -> Result<Vec<Skip>> {
    let stashes = list.iter().enumerate().filter(|(_, layer)| layer.stashes);
    let mut skips: Vec<_> = stashes.map(|(stash, _)| Skip { stash, pops: Vec::new() }).collect();
    for (position, layer) in list.iter().enumerate() {
        let Some(skip) = &layer.pops else { continue };
        let named = |name: String| skips.iter().position(|skip| list[skip.stash].name == name);
        let Some(found) = skip.candidates().find_map(named) else {
            let (name, skip) = (layer.name.clone(), skip.skip.clone());
            return Err(LayersError::SkipUnknown { position, name, skip }.into());
        };
        let stash = skips[found].stash;
        if stash > position {
            let (name, skip) = (layer.name.clone(), list[stash].name.clone());
            return Err(LayersError::SkipTooEarly { position, name, skip, stash }.into());
        }
        skips[found].pops.push(position);
    }
    match skips.iter().find(|skip| skip.pops.is_empty()) {
        Some(&Skip { stash, .. }) => {
            Err(LayersError::SkipUnused { position: stash, skip: list[stash].name.clone() }.into())
        }
        None => Ok(skips),
    }
}

/// Fails if both `block` and `block.conv` are layers: `block` may have a variable of that name.
fn check_nesting(list: &[Description], positions: &HashMap<&str, usize>) -> Result<()> {
    for (second, layer) in list.iter().enumerate() {
        let inner = layer.name.as_str();
        let outers = inner.match_indices('.').map(|(end, _)| &inner[..end]);
        for outer in outers {
            if let Some(&first) = positions.get(outer) {
                let (outer, inner) = (outer.into(), inner.into());
                return Err(LayersError::Inside { outer, first, inner, second }.into());
            }
        }
    }
    Ok(())
}
