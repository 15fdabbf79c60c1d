//! Metrics in the text format of Prometheus.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use super::WebState;
use crate::story::Phase;
use crate::story::installation::{Installation, STAGES};

const PHASES: [(Phase, &str); 5] = [
    (Phase::Preparing, "preparing"),
    (Phase::Booting, "booting"),
    (Phase::Running, "running"),
    (Phase::Asleep, "asleep"),
    (Phase::Stopping, "stopping"),
];

pub(super) async fn metrics(State(web): State<Arc<WebState>>) -> Response {
    // Without an answer of the machine, its metrics are left out.
    let machine = web.machine.get().await;
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, kind)], text(&web, machine.as_ref())).into_response()
}

fn text(web: &WebState, machine: Option<&Value>) -> String {
    let mut text = Text::default();
    let version = env!("CARGO_PKG_VERSION");
    text.family("transom_info", "What runs.", &[(&[("version", version)], 1.0)]);
    let phase = web.story.phase();
    for (it, name) in PHASES {
        let value = f64::from(u8::from(it == phase));
        text.sample("transom_phase", "The phase of the pod's life.", &[("phase", name)], value);
    }
    let age = web.story.since.elapsed().as_secs_f64();
    text.family("transom_uptime_seconds", "Seconds since the pod began.", &[(&[], age)]);
    let up = f64::from(u8::from(machine.is_some()));
    text.family("transom_machine_up", "Whether the machine answers.", &[(&[], up)]);
    let agent = f64::from(u8::from(web.agent.answers()));
    text.family("transom_agent_up", "Whether the guest's agent answers.", &[(&[], agent)]);
    install(&mut text, web.story.installation());
    let Some(machine) = machine else { return text.0 };
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    for (name, help, key) in [
        ("transom_processors", "Processors of the machine.", "processors"),
        ("transom_memory_bytes", "Memory of the machine.", "memory"),
        ("transom_resets_total", "Resets of the machine.", "resets"),
    ] {
        text.family(name, help, &[(&[], number(&machine[key]))]);
    }
    let viewers = machine["viewers"].as_array().map_or(0, Vec::len);
    let viewers = f64::from(u32::try_from(viewers).unwrap_or(u32::MAX));
    text.family("transom_viewers", "Viewers of the screen.", &[(&[], viewers)]);
    for disk in machine["disks"].as_array().into_iter().flatten() {
        let name = disk["name"].as_str().unwrap_or_default();
        let size = number(&disk["size"]);
        text.sample("transom_disk_size_bytes", "Size of a disk.", &[("disk", name)], size);
    }
    for link in machine["links"].as_array().into_iter().flatten() {
        let name = link["name"].as_str().unwrap_or_default();
        let up = f64::from(u8::from(link["up"].as_bool().unwrap_or(false)));
        text.sample("transom_link_up", "Whether frames go through.", &[("link", name)], up);
    }
    text.0
}

/// The installation of Windows, if one is reported.
fn install(text: &mut Text, installation: Option<Installation>) {
    let Some(now) = installation else { return };
    for (stage, name, _) in STAGES {
        let value = f64::from(u8::from(stage == now.stage));
        let help = "The stage of the installation of Windows.";
        text.sample("transom_installation_stage", help, &[("stage", name)], value);
    }
    let failed = f64::from(u8::from(now.failed.is_some()));
    let help = "Whether the installation of Windows failed.";
    text.family("transom_installation_failed", help, &[(&[], failed)]);
    if let Some(status) = now.install_status {
        let help = "The exit status of install.bat.";
        text.family("transom_install_bat_status", help, &[(&[], f64::from(status))]);
    }
}

#[derive(Default)]
struct Text(String);

/// Pairs of label name and value.
type Labels<'a> = &'a [(&'a str, &'a str)];

impl Text {
    fn family(&mut self, name: &str, help: &str, samples: &[(Labels<'_>, f64)]) {
        for (labels, value) in samples {
            self.sample(name, help, labels, *value);
        }
    }

    fn sample(&mut self, name: &str, help: &str, labels: Labels<'_>, value: f64) {
        if !self.0.contains(&format!("# TYPE {name} ")) {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string");
        }
        let labels: Vec<_> =
            labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        match labels.is_empty() {
            true => writeln!(self.0, "{name} {value}").expect("a string"),
            false => writeln!(self.0, "{name}{{{}}} {value}", labels.join(",")).expect("a string"),
        }
    }
}

/// Escapes a label value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
