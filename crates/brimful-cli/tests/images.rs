//! Folders of images, a subfolder a class: trained on, tested, predicted; and those that do not do.

mod program;

use std::fs;
use std::path::Path;

use predicates::prelude::*;
use program::{complains, folder, json_lines, lines, refused, run, stderr};

/// Images of a class: warm or cold, with a grain of their own each.
fn fill(class: &Path, count: u32, warm: bool) {
    fs::create_dir_all(class).expect("a folder");
    for number in 0..count {
        let ending = if number % 3 == 0 { "png" } else { "jpg" };
        let path = class.join(format!("{number:03}.{ending}"));
        program::picture(40, 30 + number, warm, number).save(path).expect("written");
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
    // Broken from the start, and broken in the middle.
    fs::write(data.join("warm/000.jpg"), "no image").expect("written");
    let whole = fs::read(data.join("cold/001.jpg")).expect("an image");
    fs::write(data.join("cold/001.jpg"), &whole[..whole.len() - 20]).expect("written");
    let (data, saved) = (data.display().to_string(), saved.display().to_string());

    let line = format!(
        "train --device cpu --model resnet18 --data {data} --image 16 --batch-size 16 --micro-batch 8 --epochs 4 \
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

    let (tensors, metadata) = program::saved(&saved);
    assert_eq!((&*metadata["classes"], &*metadata["image"]), ("[\"cold\",\"warm\"]", "16"));
    let head = tensors.iter().find(|(name, _)| name == "fc.weight").expect("torchvision's name");
    assert_eq!(head.1.size(), [2, 512]);

    let predict = format!("predict --device cpu --weights {saved} --data {data} --json");
    let answers = lines(&predict);
    let names: Vec<_> = answers.iter().map(|answer| answer["name"].as_str()).collect();
    assert_eq!(names, [[Some("cold"); 3], [Some("warm"); 3]].concat());
    // One that breaks later is missing; the others keep their numbers.
    let broken = format!("{data}/cold/028.jpg");
    let whole = fs::read(&broken).expect("an image");
    fs::write(&broken, &whole[..whole.len() - 20]).expect("written");
    let answers = lines(&predict);
    let indices: Vec<_> = answers.iter().map(|answer| answer["index"].as_u64()).collect();
    assert_eq!(indices, [0, 2, 3, 4, 5].map(Some));
    fs::remove_file(format!("{data}/warm/000.jpg")).expect("removed");
    fs::rename(format!("{data}/warm"), format!("{data}/hot")).expect("renamed");
    complains(
        &format!("predict --device cpu --weights {saved} --data {data} --image 16"),
        2,
        "the model knows the classes cold, warm, but the data have cold, hot",
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
    complains(&line, 1, "val lacks the class cold: give both halves the same classes");
}

#[test]
fn folders_without_classes_or_images_are_told_in_a_line() {
    let folder = folder("no-images");
    let data = folder.display().to_string();
    let train = format!("train --device cpu --model resnet18 --data {data}");
    complains(&train, 1, "nor a subfolder");
    fill(&folder.join("warm"), 3, true);
    complains(&train, 1, "has 1 subfolders with images, but 2 are needed");
    fs::create_dir(folder.join("cold")).expect("a folder");
    complains(&train, 1, "cold has no image: put .jpg, .jpeg or .png files into it, or remove it");
    for class in ["one/warm", "one/cold"] {
        fill(&folder.join(class), 1, class == "one/warm");
    }
    complains(&format!("{train}/one"), 1, "has one image in each class, so that none is left");
    fs::remove_dir_all(folder.join("one")).expect("removed");
    fs::write(folder.join("cold/a.jpg"), "no image").expect("written");
    refused(&train, 1, "no image of the class cold can be read");
    let none = "--image is for a folder of images, but --data digits is none";
    complains("train --image 32", 2, none);
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-llama");
    let train = format!("train --model {tiny} --from-scratch --data {data}");
    complains(&train, 2, "a folder's model needs text: give --data a text file, or synthetic");
}
