//! Tests of `brimful-bench ragged`: every cut gives the same gradient, and cuts by tokens have fewer positions.

#[test]
fn each_cut_has_a_row_and_all_have_the_same_gradient() {
    let ragged = "ragged --device cpu --layers 1 --width 16 --heads 2 --batch-size 9";
    let (rows, _) = crate::program::rows(&format!("{ragged} --token-budget 2048 --repeats 1"));
    let expected = ["brimful, by samples", "tch loop", "brimful, by tokens"];
    assert_eq!(crate::program::contestants(&rows), expected);
    let counts: Vec<_> = rows.iter().filter_map(|row| row["micro_batches"].as_u64()).collect();
    assert_eq!(counts[..2], [5, 5]);
    assert!(counts[2] < 5, "{counts:?}");
    for row in &rows {
        assert!(row["gradient_difference"].as_f64() <= Some(1e-10), "{row}");
        assert!(row["tokens_per_s"].as_f64() > Some(0.0), "{row}");
    }
}
