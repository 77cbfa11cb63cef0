//! Folders of images with one subfolder per class: training, tests, predictions, and invalid folders.

use std::fs;
use std::path::Path;

use crate::program::{complains, folder, json_lines, lines, refused, run, stderr};
use predicates::prelude::*;

/// Writes images of a class: warm or cold colours, each with its own grain.
fn fill(class: &Path, count: u32, warm: bool) {
    fs::create_dir_all(class).expect("a folder");
    for number in 0..count {
        let ending = if number % 3 == 0 { "png" } else { "jpg" };
        let path = class.join(format!("{number:03}.{ending}"));
        crate::program::picture(40, 30 + number, warm, number).save(path).expect("written");
    }
}

#[test]
fn a_residual_network_learns_the_classes_of_a_folder_and_keeps_their_names() {
    let folder = folder("images");
    let (data, saved) = (folder.join("weather"), folder.join("weather.safetensors"));
    for (class, warm) in [("warm", true), ("cold", false)] {
        fill(&data.join(class), 30, warm);
    }
    fs::write(data.join("warm/notes.txt"), "no image").expect("written");
    // One file is broken from the start, the other truncated.
    fs::write(data.join("warm/000.jpg"), "no image").expect("written");
    let whole = fs::read(data.join("cold/001.jpg")).expect("an image");
    fs::write(data.join("cold/001.jpg"), &whole[..whole.len() - 20]).expect("written");
    let (data, saved) = (data.display().to_string(), saved.display().to_string());

    let line = format!(
        "train --device cpu --model resnet18 --data {data} --image 16 --batch-size 16 --micro-batch-size 8 --epochs 4 \
         --save {saved} --json"
    );
    let trained = run(&line).success().stderr(
        predicate::str::contains("warm/000.jpg cannot be read and is left out: ")
            .and(predicate::str::contains("cold/001.jpg cannot be read and is left out: "))
            .and(predicate::str::contains("notes.txt").not()),
    );
    let told = stderr(&trained);
    assert_eq!(told.matches("001.jpg").count(), 1, "each is named once: {told}");
    let last = json_lines(&trained).pop().expect("a line");
    assert_eq!(last["test_accuracy"], 1.0);

    let (tensors, metadata) = crate::program::saved(&saved);
    assert_eq!((&*metadata["classes"], &*metadata["image"]), ("[\"cold\",\"warm\"]", "16"));
    let head = tensors.iter().find(|(name, _)| name == "fc.weight").expect("torchvision's name");
    assert_eq!(head.1.size(), [2, 512]);

    assert_all_are_answered(&saved, &data);
    assert_new_images_are_answered(&saved, &data);
    fs::remove_file(format!("{data}/warm/000.jpg")).expect("removed");
    fs::rename(format!("{data}/warm"), format!("{data}/hot")).expect("renamed");
    let predict = format!("predict --device cpu --weights {saved} --data {data}");
    for (arguments, complaint) in [
        ("", "the model has the classes cold, warm, but the data cold, hot"),
        ("--image 64", "and below 64 pixels the first convolution of resnet18 is a different one"),
        (
            "/no/such.png",
            "weather is no .jpg, .jpeg or .png file: give images, or one folder of them",
        ),
    ] {
        complains(&format!("{predict} {arguments}"), 2, complaint);
    }
}

/// Returns the predicted names, with their files.
fn named(arguments: &str) -> Vec<(String, String)> {
    let text = |answer: &serde_json::Value, key: &str| answer[key].as_str().expect(key).to_owned();
    let answers = lines(&format!("predict --device cpu --json {arguments}"));
    answers.iter().map(|answer| (text(answer, "file"), text(answer, "name"))).collect()
}

/// Predicts a whole labelled folder: unreadable images are missing, and the others keep their numbers.
fn assert_all_are_answered(saved: &str, data: &str) {
    let predict = format!("predict --device cpu --weights {saved} --data {data}");
    let answers = lines(&format!("{predict} --json"));
    let indices: Vec<_> = answers.iter().filter_map(|answer| answer["index"].as_u64()).collect();
    // The second image of the one class, the first of the other.
    assert!(indices.into_iter().eq((0..61).filter(|index| ![1, 30].contains(index))));
    for answer in &answers {
        let [class, target] = ["class", "target"].map(|key| answer[key].as_i64().expect(key));
        assert_eq!(class, target, "{answer}");
        let top = answer["top"].as_array().expect("classes");
        assert_eq!((top.len(), top[0]["class"].as_i64()), (2, Some(class)));
        let sum: f64 = top.iter().filter_map(|one| one["probability"].as_f64()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{answer}");
    }
    let said = predicate::str::contains("59 of 59 are correct: 100.0 %");
    run(&predict).success().stdout(said.and(predicate::str::contains("warm/002.jpg  class   1")));
    // A folder with only some of the classes.
    let one = format!("{data}-one");
    fill(&Path::new(&one).join("warm"), 3, true);
    let answers = lines(&format!("predict --device cpu --weights {saved} --data {one} --json"));
    let targets: Vec<_> = answers.iter().map(|answer| answer["target"].as_i64()).collect();
    assert_eq!(targets, [Some(1); 3]);
}

/// Predicts one image, several, and a folder without classes.
fn assert_new_images_are_answered(saved: &str, data: &str) {
    let [cold, warm] = ["cold/003.png", "warm/004.jpg"].map(|name| format!("{data}/{name}"));
    let weights = format!("--weights {saved} --data");
    let answered = |file: &str, name: &str| (file.to_owned(), name.to_owned());
    assert_eq!(named(&format!("{weights} {warm}")), [answered(&warm, "warm")]);
    let both = [answered(&warm, "warm"), answered(&cold, "cold")];
    assert_eq!(named(&format!("{weights} {warm} {cold}")), both);
    let plain = format!("{data}-plain");
    fs::create_dir(&plain).expect("a folder");
    fs::copy(&warm, format!("{plain}/b.jpg")).expect("copied");
    fs::copy(&cold, format!("{plain}/a.png")).expect("copied");
    let found = named(&format!("{weights} {plain}"));
    assert_eq!(found.iter().map(|(_, name)| &**name).collect::<Vec<_>>(), ["cold", "warm"]);
    let shown = run(&format!("predict --device cpu {weights} {plain}")).success();
    shown.stdout(
        predicate::str::contains("2 images\n").and(predicate::str::contains("%  warm  cold ")),
    );
}

#[test]
fn halves_of_their_own_are_trained_and_tested_on() {
    let folder = folder("image-halves");
    for (half, count) in [("train", 8), ("val", 3)] {
        for class in ["warm", "cold"] {
            fill(&folder.join(half).join(class), count, class == "warm");
        }
    }
    let data = folder.display().to_string();
    let line = format!("train --device cpu --data {data} --image 8 --epochs 1 --batch-size 4");
    run(&line).success().stdout(
        predicate::str::contains("images of 8×8 pixels, 2 classes").and(
            predicate::str::contains("16 samples").or(predicate::str::contains("16 to train")),
        ),
    );
    fs::remove_dir_all(folder.join("val/cold")).expect("removed");
    fill(&folder.join("val/windy"), 3, false);
    complains(&line, 2, "val lacks the class cold: give both splits the same classes");
}

#[test]
fn folders_without_classes_or_images_are_reported_in_a_line() {
    let folder = folder("no-images");
    let data = folder.display().to_string();
    let train = format!("train --device cpu --model resnet18 --data {data}");
    complains(&train, 2, "nor a subfolder");
    fill(&folder.join("warm"), 3, true);
    complains(&train, 2, "has 1 subfolders with images, but at least 2 are needed");
    fs::create_dir(folder.join("cold")).expect("a folder");
    complains(&train, 2, "cold has no image: put .jpg, .jpeg or .png files into it, or remove it");
    for class in ["one/warm", "one/cold"] {
        fill(&folder.join(class), 1, class == "one/warm");
    }
    complains(&format!("{train}/one"), 2, "has one image in each class, and none to test on");
    fs::remove_dir_all(folder.join("one")).expect("removed");
    fs::write(folder.join("cold/a.jpg"), "no image").expect("written");
    refused(&train, 2, "no image of the class cold can be read");
    let none = "--image is for a folder of images, but --data digits is not one";
    complains("train --image 32", 2, none);
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-llama");
    let train = format!("train --model {tiny} --from-scratch --data {data}");
    complains(&train, 2, "a model of a folder needs text: give --data a text file, or synthetic");
}
