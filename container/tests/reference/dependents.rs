//! The Compose files of projects that start the reference image: each starts here, and the lines
//! that their scripts look for are those of our log.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use container::command::{Start, start};
use container::download::{meter::Meter, title};
use container::plan::Plan;
use container::pod::{SHUT_DOWN, console::Console, started};
use container::settings::environment::Environment;
use container::settings::value::Value as _;
use container::source::Source;
use container::story::Story;
use serde_json::Value;

use crate::host::{Host, warnings};

/// The entry point of the image.
const ENTRY: [&str; 1] = ["/usr/bin/transom"];

/// Reads a Compose file; `None` without a parser of YAML on this host.
fn read(path: &Path) -> Option<Value> {
    const PROGRAM: &str =
        "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)";
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", PROGRAM]).stdin(File::open(path).unwrap()).stderr(Stdio::null());
    let output = python.output().ok().filter(|output| output.status.success())?;
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// A list of words, which may also be written as one text.
fn words(value: &Value) -> Vec<String> {
    match value {
        Value::Array(all) => all.iter().map(|it| it.as_str().unwrap().to_owned()).collect(),
        Value::String(text) => text.split(' ').map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

/// The environment with the engine's own variables.
fn environment(service: &Value) -> Environment {
    let all = service["environment"].as_object().unwrap().iter();
    let own = all.map(|(name, value)| {
        let value = value.as_str().unwrap().replace("${HOME}", "/root");
        (name.into(), value.into())
    });
    own.chain([("HOSTNAME".into(), "box".into()), ("PATH".into(), "/usr/bin".into())]).collect()
}

/// Makes what the engine mounts: folders, with a script in `/oem`, and devices.
fn mount(service: &Value, root: &Path) {
    for volume in words(&service["volumes"]) {
        // The last part may be options, such as `:Z`.
        let inside = volume.rsplit(':').find(|part| part.starts_with('/')).unwrap();
        let path = root.join(inside.trim_start_matches('/'));
        fs::create_dir_all(&path).unwrap();
        if inside == "/oem" {
            fs::write(path.join("install.bat"), "echo\r\n").unwrap();
        }
    }
    for device in words(&service["devices"]) {
        let path = root.join(device.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        if !path.exists() {
            fs::write(path, "").unwrap();
        }
    }
}

/// Checks that the container's command line starts the pod. The first words are the entry point.
fn check_command(service: &Value, file: &str) {
    let entry = match words(&service["entrypoint"]) {
        none if none.is_empty() => ENTRY.map(str::to_owned).to_vec(),
        own => own,
    };
    let command = match words(&service["command"]) {
        none if none.is_empty() && entry == ENTRY => vec!["pod".to_owned()],
        own => own,
    };
    let given = command.clone();
    let mut all = entry.into_iter().chain(command);
    let program = all.next().unwrap();
    let starts = match start(&program, all.collect(), true) {
        Start::Command(words) => words == ["pod"],
        Start::Pod { ignored } => ignored == given,
    };
    assert!(starts, "{file}: {given:?}");
}

/// The lines of our log while Windows is downloaded, installed, started and stopped.
fn log(plan: &Plan) -> Vec<String> {
    let story = Story::new();
    let Source::Download(version) = &plan.source else { panic!("{:?}", plan.source) };
    let mut meter = Meter::begin(&story, &title(version));
    meter.update(0, 1 << 30);
    meter.update(1 << 30, 1 << 30);
    let firmware = "BdsDxe: starting Boot0004 \"Windows Boot Manager\" from HD(1,GPT,7B1C)\r\n";
    for line in Console::default().take(firmware.as_bytes()) {
        story.info(&format!("guest: {line}"));
    }
    let screen = &plan.input.settings.screen;
    story.info(&started(&plan.name(), screen.web.then_some(screen.web_port.0)));
    story.info(SHUT_DOWN);
    story.lines(0).0.into_iter().map(|line| line.text).collect()
}

#[test]
fn the_compose_files_of_dependents_start() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/compose");
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 9, "{files:?}");
    for path in files {
        let file = path.file_name().unwrap().to_str().unwrap();
        let Some(compose) = read(&path) else {
            return skip::not_run("Compose files of dependents", "python3-yaml is missing");
        };
        let service = &compose["services"]["windows"];
        let host = Host::make();
        mount(service, host.root());
        check_command(service, file);
        let plan = Plan::make(&environment(service), host.root());
        let plan = plan.unwrap_or_else(|error| panic!("{file}: {error:#}"));
        // Exactly these warnings, so that a new one is noticed.
        let expected = words(&compose["x-test"]["warnings"]);
        let warnings = warnings(&plan);
        for warning in &expected {
            let said = warnings.iter().any(|it| it.starts_with(warning.as_str()));
            assert!(said, "{file}: no {warning} in {warnings:?}");
        }
        for warning in warnings {
            let known = expected.iter().any(|it| warning.starts_with(it.as_str()));
            assert!(known, "{file}: {warning}");
            // LinOffice takes these words in the log for a broken container.
            let text = warning.to_lowercase();
            assert!(!["error", "failed", "fatal"].iter().any(|it| text.contains(it)), "{warning}");
        }
        if let Some(expected) = compose["x-test"]["arguments"].as_str() {
            let arguments = &plan.input.settings.machine.arguments;
            assert_eq!(arguments.show(), expected, "{file}");
        }
        let log = log(&plan);
        for wanted in words(&compose["x-test"]["log"]) {
            assert!(log.iter().any(|line| line.contains(&wanted)), "{file}: {wanted} in {log:?}");
        }
        // The screen is at the port that is published.
        let port = plan.input.settings.screen.web_port.0.to_string();
        let ports = words(&service["ports"]);
        let published = ports
            .iter()
            .any(|it| it.trim_end_matches("/tcp").rsplit(':').next() == Some(port.as_str()));
        assert!(published, "{file}: {ports:?}");
    }
}
