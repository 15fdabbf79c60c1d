//! Disassembles the tables with the ACPI reference compiler, and compiles them again. The compiler
//! must report no error, no warning and no remark.

use std::path::Path;
use std::process::Command;

use crate::sample::samples;

fn run(directory: &Path, arguments: &[&str]) -> String {
    let output = Command::new("iasl").args(arguments).current_dir(directory).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "iasl {arguments:?}: {text}");
    text
}

/// Splits the blob into tables by their headers.
fn split(mut blob: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut tables = vec![];
    while let Some(start) = blob.iter().position(|byte| *byte != 0) {
        blob = &blob[start..];
        let length = u32::from_le_bytes(blob[4..8].try_into().unwrap()) as usize;
        let name = String::from_utf8(blob[..4].to_vec()).unwrap();
        tables.push((name, blob[..length].to_vec()));
        blob = &blob[length..];
    }
    tables
}

#[test]
fn iasl_recompiles_every_table_without_warnings() {
    if let Err(error) = Command::new("iasl").arg("-v").output() {
        let test = "iasl_recompiles_every_table_without_warnings";
        skip::not_run(test, &format!("iasl of the package acpica-tools does not start: {error}"));
        return;
    }
    for sample in samples() {
        let name = format!("boot-iasl-{}-{}", sample.name, std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let (image, _) = sample.tables().image().unwrap();
        let tables = split(&image[1].1);
        assert!(tables.len() >= 8, "{}", tables.len());
        for (name, bytes) in tables {
            let (binary, source) = (format!("{name}.aml"), format!("{name}.dsl"));
            std::fs::write(directory.join(&binary), &bytes).unwrap();
            let text = run(&directory, &["-d", &binary]);
            assert!(!text.contains("Warning") && !text.contains("Error"), "{name}: {text}");
            let text = run(&directory, &["-p", "again", &source]);
            assert!(
                text.contains("0 Errors, 0 Warnings, 0 Remarks"),
                "{}: {name}: {text}",
                sample.name
            );
            let again = std::fs::read(directory.join("again.aml")).unwrap();
            // The compiler writes its own name into the header.
            assert!(again[HEADER..] == bytes[HEADER..], "{}: {name} differs", sample.name);
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

/// Length of a table's header, which the compiler may change.
const HEADER: usize = 36;
