//! Writes steps as Chrome trace JSON, for Perfetto and `chrome://tracing`.

use serde::Serialize;

use super::super::{
    Actions, Costs, HostLinkUse, Simulation, Span, TransferKind, TransferSpan, WaitSpan, memory,
};

/// Trace file: a list of events.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TraceFile {
    trace_events: Vec<TraceEvent>,
    display_time_unit: &'static str,
}

/// Event of the format: times are in microseconds, a thread is a device.
#[derive(Serialize, Default)]
struct TraceEvent {
    name: String,
    #[serde(rename = "ph")]
    phase: &'static str,
    #[serde(rename = "ts")]
    start: f64,
    #[serde(rename = "dur", skip_serializing_if = "Option::is_none")]
    duration: Option<f64>,
    #[serde(rename = "cat", skip_serializing_if = "Option::is_none")]
    category: Option<&'static str>,
    pid: u32,
    tid: usize,
    args: EventArgs,
}

/// Details shown for a selected event.
#[derive(Serialize)]
#[serde(untagged)]
enum EventArgs {
    Name { name: String },
    Action { stage: u32, micro_batch: u32 },
    Transfer { stage: u32, bytes: u64 },
    Awaited { awaited: &'static str },
    Bytes { bytes: u64 },
    Held { activations: usize },
}

impl Default for EventArgs {
    fn default() -> Self {
        Self::Held { activations: 0 }
    }
}

const MICROSECONDS: f64 = 1e6;

/// Returns the trace, with times in seconds: a track for each device with its actions and waits, two for
/// its host link if there are transfers, and one for its memory.
#[must_use]
pub fn trace(actions: &Actions, costs: &Costs, simulation: &Simulation) -> String {
    let mut events = tracks(simulation.timeline(), simulation.host_links());
    for device in 0..simulation.timeline().len() {
        events.extend(memory(device, actions, costs, simulation));
    }
    written(events)
}

/// Returns the trace of executed actions, with the transfers of each device if they were timed.
#[must_use]
pub fn measured_trace(timeline: &[Vec<Span>], host_links: &[HostLinkUse]) -> String {
    written(tracks(timeline, host_links))
}

fn tracks(timeline: &[Vec<Span>], host_links: &[HostLinkUse]) -> Vec<TraceEvent> {
    let mut events = Vec::new();
    for (device, spans) in timeline.iter().enumerate() {
        events.push(track(device, format!("device {device}")));
        events.extend(spans.iter().map(|span| work(device, span)));
    }
    // Waits are on the devices' own tracks, between their actions.
    for (device, host_link) in host_links.iter().enumerate() {
        events.extend(host_link.waits.iter().map(|span| waiting(device, span)));
    }
    // Two tracks for each device, after those of all devices: transfers to it, and transfers to the host.
    for (device, host_link) in host_links.iter().enumerate() {
        for (way, name) in ["to", "from"].into_iter().enumerate() {
            let is_this_way =
                if way == 0 { TransferKind::is_inward } else { TransferKind::is_outward };
            let tid = host_links.len() + 2 * device + way;
            events.push(track(tid, format!("host link {name} device {device}")));
            let mine = host_link.transfers.iter().filter(|span| is_this_way(span.transfer.kind));
            events.extend(mine.map(|span| transfer_event(tid, span)));
        }
    }
    events
}

fn waiting(device: usize, span: &WaitSpan) -> TraceEvent {
    TraceEvent {
        name: format!("waits for {}", span.awaited.name()),
        category: Some("wait"),
        args: EventArgs::Awaited { awaited: span.awaited.name() },
        ..lasting(device, span.start, span.end)
    }
}

fn transfer_event(tid: usize, span: &TransferSpan) -> TraceEvent {
    TraceEvent {
        name: span.transfer.to_string(),
        category: Some(span.transfer.kind.name()),
        args: EventArgs::Transfer { stage: span.transfer.stage.0, bytes: span.bytes },
        ..lasting(tid, span.start, span.end)
    }
}

fn written(events: Vec<TraceEvent>) -> String {
    let trace = TraceFile { trace_events: events, display_time_unit: "ms" };
    serde_json::to_string(&trace).expect("strings and finite numbers")
}

fn track(tid: usize, name: String) -> TraceEvent {
    TraceEvent {
        name: "thread_name".into(),
        phase: "M",
        tid,
        args: EventArgs::Name { name },
        ..TraceEvent::default()
    }
}

fn work(device: usize, span: &Span) -> TraceEvent {
    let action = span.action;
    TraceEvent {
        name: action.to_string(),
        category: Some(action.kind.name()),
        args: EventArgs::Action { stage: action.stage.0, micro_batch: action.micro_batch.0 },
        ..lasting(device, span.start, span.end)
    }
}

/// Returns an event with a duration on a track.
fn lasting(tid: usize, start: f64, end: f64) -> TraceEvent {
    let duration = Some((end - start) * MICROSECONDS);
    TraceEvent { phase: "X", start: start * MICROSECONDS, duration, tid, ..TraceEvent::default() }
}

/// Returns the memory of a device over time: bytes if they are known, else the number of activations.
fn memory(
    device: usize,
    actions: &Actions,
    costs: &Costs,
    simulation: &Simulation,
) -> Vec<TraceEvent> {
    let has_bytes = simulation.devices()[device].peak_bytes > 0;
    let level = |time: f64, args: EventArgs| TraceEvent {
        name: format!("memory of device {device}"),
        phase: "C",
        start: time * MICROSECONDS,
        tid: device,
        args,
        ..TraceEvent::default()
    };
    // Transfers are not among the actions, so the simulation has recorded the memory.
    if let Some(levels) = simulation.levels.get(device) {
        let bytes = |&(time, bytes): &(f64, u64)| level(time, EventArgs::Bytes { bytes });
        return levels.iter().map(bytes).collect();
    }
    let mut events = Vec::new();
    memory::walk(actions, costs, &simulation.timeline()[device], |time, bytes, activations| {
        let args =
            if has_bytes { EventArgs::Bytes { bytes } } else { EventArgs::Held { activations } };
        events.push(level(time, args));
    });
    events
}
