//! Tests of `brimful-bench loader`: the folder that it generates, and its rows.

use std::fs;

#[test]
fn a_folder_is_made_once_and_all_of_its_images_come() {
    let data = crate::program::folder("loader").join("images");
    let flags = "--images 12 --image 16 --batch-size 5 --workers 2 --repeats 2";
    for _ in 0..2 {
        let (rows, _) = crate::program::rows(&format!("loader {flags} --data {}", data.display()));
        assert_eq!(rows.len(), 1);
        let row = &rows[0];
        assert_eq!(
            (row["contestant"].as_str(), row["images"].as_u64()),
            (Some("brimful"), Some(12))
        );
        assert!(row["images_per_s"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["seconds"].as_array().map(Vec::len), Some(2));
        let classes = fs::read_dir(&data).expect("a folder").count();
        assert_eq!(classes, 10);
    }
}
