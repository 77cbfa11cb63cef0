//! Letters in a run's file.

use std::collections::BTreeSet;

use brimful_plan::schedule::{ActionKind, Awaited, TransferKind};

#[test]
fn actions_transfers_and_causes_of_waiting_have_letters_of_their_own() {
    let actions = ActionKind::ALL.map(ActionKind::letter);
    let transfers = TransferKind::ALL.map(TransferKind::letter);
    let awaited = Awaited::ALL.map(Awaited::letter);
    let all = [actions.as_slice(), &transfers, &awaited].concat();
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{all:?}");
}
