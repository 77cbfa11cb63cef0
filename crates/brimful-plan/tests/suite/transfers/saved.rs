//! Tests that costs and timelines of earlier versions still load.

use brimful_plan::schedule::{
    Awaited, Costs, HostLinkCost, HostLinkUse, LinkCost, StageCost, StageId, Transfer,
    TransferKind, TransferSpan, WaitSpan,
};

#[test]
fn costs_with_former_names_load() {
    let stage = StageCost { offloaded_bytes: 3, ..StageCost::default() };
    let link = LinkCost { latency: 0.0, bandwidth: 1.0 };
    let host_link = HostLinkCost::equal(4.0);
    let costs =
        Costs { stages: vec![stage], input_bytes: 1, link, host_link, update_in_backward: false };
    let renamed = [("offloaded_bytes", "home_bytes"), ("host_link", "bus")];
    assert_eq!(serde_json::from_str::<Costs>(&former(&costs, &renamed)).unwrap(), costs);
}

#[test]
fn timelines_with_former_names_load() {
    let kind = TransferKind::OffloadGradients;
    let transfer = Transfer { kind, stage: StageId(1), micro_batch: None, before: 2 };
    let transfers = vec![TransferSpan { transfer, start: 1.0, end: 2.0, bytes: 8 }];
    let waits = vec![WaitSpan { awaited: Awaited::GradientMemory, start: 2.0, end: 3.0 }];
    let host_link = HostLinkUse { transfers, waits };
    let renamed = [
        ("transfers", "moves"),
        ("transfer", "moved"),
        ("offload-gradients", "gradients-home"),
        ("gradient-memory", "gradients-room"),
    ];
    assert_eq!(
        serde_json::from_str::<HostLinkUse>(&former(&host_link, &renamed)).unwrap(),
        host_link
    );
}

/// Returns the JSON of an earlier version, which had the second name of each pair.
fn former(value: &impl serde::Serialize, renamed: &[(&str, &str)]) -> String {
    let json = serde_json::to_string(value).unwrap();
    renamed.iter().fold(json, |json, (new, old)| {
        let changed = json.replace(&format!("\"{new}\""), &format!("\"{old}\""));
        assert_ne!(changed, json, "{new}");
        changed
    })
}
