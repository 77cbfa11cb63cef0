//! Tests of the errors of invalid schedules and costs.

use brimful_plan::schedule::{Actions, Costs, Recompute, Schedule, StageCost, simulate};

fn refused(csv: &str) -> String {
    csv.parse::<Actions>().unwrap_err().to_string()
}

#[test]
fn broken_rules() {
    insta::assert_snapshot!(refused("0F0,0B0,0F1,0B1\n1F0,1B0,1F1"), @"
    1B1 is missing: every stage needs a forward and a backward of every micro-batch
    device 0    0F0   0B0   0F1   0B1
    device 1    1F0   1B0   1F1  [1B1?]
    ");
    insta::assert_snapshot!(refused("0F0,0B0\n1F0,1F0,1B0"), @"
    1F0 is there twice: remove one
    device 0    0F0   0B0
    device 1    1F0  [1F0]  1B0
    ");
    insta::assert_snapshot!(refused("0F0,0B0\n1B0,1F0"), @"
    1B0 comes before its forward: move it after
    device 0    0F0   0B0
    device 1   [1B0]  1F0
    ");
    insta::assert_snapshot!(refused("0F0,0W0,0I0"), @"
    0W0 comes before its input gradient: move it after
    device 0    0F0  [0W0]  0I0
    ");
    insta::assert_snapshot!(refused("0F0,0B0,0I0,0W0"), @"
    0I0 computes a gradient that an earlier action computes already: use B (whole backward) alone, or I (input gradient) and W (weight gradient)
    device 0    0F0   0B0  [0I0]  0W0
    ");
    insta::assert_snapshot!(refused("0F0,0B0,0R0"), @"
    0R0 comes after its backward has begun: move it before, or remove it
    device 0    0F0   0B0  [0R0]
    ");
    insta::assert_snapshot!(refused("0F0,1F0\n1B0,0B0"), @"
    stage 1 is on device 0 and on device 1: keep it on one
    device 0    0F0   1F0
    device 1   [1B0]  0B0
    ");
    insta::assert_snapshot!(refused("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1"), @"
    1F1 is next, but the neighbour hands over micro-batch 0 first: run the micro-batches in one order on both stages
    device 0    0F0   0F1   0B0   0B1
    device 1   [1F1]  1F0   1B0   1B1
    ");
    insta::assert_snapshot!(refused("0F0,0B0\n2F0,2B0\n"), @"
    1F0 is missing: every stage needs a forward and a backward of every micro-batch
    device 0    0F0   0B0
    device 1    2F0   2B0  [1F0?]
    ");
    insta::assert_snapshot!(refused("0F0,0B0\n,,\n"), @"
    device 1 has no action: leave it out, or give it a stage
    device 0    0F0   0B0
    device 1
    ");
    insta::assert_snapshot!(refused("# nothing\n\n"), @"the schedule holds no action: give each device at least one forward and its backward");
    insta::assert_snapshot!(refused("0F0,0B0\n1F0;1B0"), @"line 2, cell 1: '1F0;1B0' is not an action: write stage, one of F B I W R, micro-batch, as in 2F0");
    insta::assert_snapshot!(refused("4294967295F4294967295,0B0"), @"
    0F0 is missing: every stage needs a forward and a backward of every micro-batch
    device 0    4294967295F4294967295   0B0  [0F0?]
    ");
}

#[test]
fn a_deadlock_names_who_waits_for_whom() {
    insta::assert_snapshot!(refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), @"
    deadlock: device 0 waits in 0B0 for stage 1, device 1 waits in 1F1 for stage 0
    device 0    0F0  [0B0]  0F1   0B1
    device 1    1F0  [1F1]  1B0   1B1
    ");
}

#[test]
fn a_large_grid_is_cut_around_the_place() {
    let good = Schedule::OneFOneB.actions(40, 100, Recompute::Never).unwrap();
    let damaged = good.to_string().replacen("20B50,", "20B49,", 1);
    insta::assert_snapshot!(refused(&damaged), @"
    20B49 is there twice: remove one
    device 14  …  14B43   14F69   14B44   14F70   14B45   14F71   14B46   14F72   14B47   14F73   14B48   14F74   14B49   14F75   14B50   14F76  …
    device 15  …  15F68   15B44   15F69   15B45   15F70   15B46   15F71   15B47   15F72   15B48   15F73   15B49   15F74   15B50   15F75   15B51  …
    device 16  …  16B44   16F68   16B45   16F69   16B46   16F70   16B47   16F71   16B48   16F72   16B49   16F73   16B50   16F74   16B51   16F75  …
    device 17  …  17F67   17B45   17F68   17B46   17F69   17B47   17F70   17B48   17F71   17B49   17F72   17B50   17F73   17B51   17F74   17B52  …
    device 18  …  18B45   18F67   18B46   18F68   18B47   18F69   18B48   18F70   18B49   18F71   18B50   18F72   18B51   18F73   18B52   18F74  …
    device 19  …  19F66   19B46   19F67   19B47   19F68   19B48   19F69   19B49   19F70   19B50   19F71   19B51   19F72   19B52   19F73   19B53  …
    device 20  …  20B46   20F66   20B47   20F67   20B48   20F68   20B49   20F69  [20B49]  20F70   20B51   20F71   20B52   20F72   20B53   20F73  …
    device 21  …  21F65   21B47   21F66   21B48   21F67   21B49   21F68   21B50   21F69   21B51   21F70   21B52   21F71   21B53   21F72   21B54  …
    device 22  …  22B47   22F65   22B48   22F66   22B49   22F67   22B50   22F68   22B51   22F69   22B52   22F70   22B53   22F71   22B54   22F72  …
    device 23  …  23F64   23B48   23F65   23B49   23F66   23B50   23F67   23B51   23F68   23B52   23F69   23B53   23F70   23B54   23F71   23B55  …
    device 24  …  24B48   24F64   24B49   24F65   24B50   24F66   24B51   24F67   24B52   24F68   24B53   24F69   24B54   24F70   24B55   24F71  …
    device 25  …  25F63   25B49   25F64   25B50   25F65   25B51   25F66   25B52   25F67   25B53   25F68   25B54   25F69   25B55   25F70   25B56  …
    ");
}

#[test]
fn numbers_of_nothing() {
    let refused = |p, m, v| {
        let schedule = Schedule::Interleaved { stages_per_device: v };
        schedule.actions(p, m, Recompute::Never).unwrap_err().to_string()
    };
    assert_eq!(refused(0, 4, 2), "the number of devices is 0: a schedule needs at least 1");
    assert_eq!(refused(4, 0, 2), "the number of micro-batches is 0: a schedule needs at least 1");
    assert_eq!(
        refused(4, 4, 0),
        "the number of stages per device is 0: a schedule needs at least 1"
    );
    insta::assert_snapshot!(refused(1 << 20, 1 << 20, 2), @"2097152 stages × 1048576 micro-batches is too large a schedule: at most 33554432 pairs of stage and micro-batch; use fewer micro-batches");
}

#[test]
fn costs_that_are_none() {
    let actions = Schedule::GPipe.actions(2, 2, Recompute::Never).unwrap();
    let refused = |costs: &Costs| simulate(&actions, costs).unwrap_err().to_string();
    insta::assert_snapshot!(refused(&Costs::ticks(3)), @"costs of 3 stages were given, but the schedule has 2 stages: give the costs of each stage");
    insta::assert_snapshot!(refused(&Costs::equal(2, StageCost::new(1.0, -1.0, 1.0))), @"the input gradient time of stage 0 is -1: it must be finite and not negative");
    insta::assert_snapshot!(refused(&Costs::equal(2, StageCost::new(f64::NAN, 1.0, 1.0))), @"the forward time of stage 0 is NaN: it must be finite and not negative");
    insta::assert_snapshot!(refused(&Costs::equal(2, StageCost::new(f64::MAX, 1.0, 1.0))), @"the times add up to more than a number can hold: give them in a larger unit");
    let mut costs = Costs::ticks(2);
    costs.link.bandwidth = 0.0;
    insta::assert_snapshot!(refused(&costs), @"the bandwidth of the link is 0: it must be above 0 (infinite for a transfer that takes no time)");
    costs.link.latency = f64::INFINITY;
    insta::assert_snapshot!(refused(&costs), @"the latency of the link is inf: it must be finite and not negative");
}
