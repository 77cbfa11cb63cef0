//! Rules for layers' names: complete, unique, and never inside each other.

use std::collections::HashMap;

use super::{Description, LayersError};
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

/// Returns the pairs (user, owner) of a list whose names are right.
pub(super) fn shared(list: &[Description]) -> Vec<(usize, usize)> {
    let position = |name: &String| list.iter().position(|layer| layer.name == *name);
    let users = list.iter().enumerate();
    users.filter_map(|(i, layer)| Some((i, position(layer.shares.as_ref()?)?))).collect()
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
