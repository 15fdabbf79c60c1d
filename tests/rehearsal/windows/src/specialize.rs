//! The pass specialize: Windows adapts itself to the machine.

use std::path::Path;

use super::console::say;
use super::drives::{self, C};
use super::registry::{NAME, OOBE, REMOTE, Registry, SETUP};
use super::shell::Shell;
use super::{answers, domain};

const PASS: &str = "specialize";

pub(crate) fn run(registry: Registry) -> anyhow::Result<()> {
    let answers = answers::kept(Path::new(C))?;
    let mut shell = Shell::new(Path::new(C), registry);
    shell.run_all(&answers.commands(PASS, "Microsoft-Windows-Deployment")?)?;
    let registry = &mut shell.registry;
    let remote = "Microsoft-Windows-TerminalServices-LocalSessionManager";
    let denied = answers.value(PASS, remote, "fDenyTSConnections");
    registry.set(REMOTE, "fDenyTSConnections", if denied == Some("false") { "0" } else { "1" });
    let stations = "Microsoft-Windows-TerminalServices-RDP-WinStationExtensions";
    let authenticates = answers.value(PASS, stations, "UserAuthentication");
    registry.set(REMOTE, "UserAuthentication", authenticates.unwrap_or("1"));
    let machine = "Microsoft-Windows-Shell-Setup";
    let name = match answers.value(PASS, machine, "ComputerName") {
        None | Some("*") => "WIN-4R8L2J7Q0VD",
        Some(name) => name,
    };
    registry.set(NAME, "ComputerName", name);
    let zone = answers.value(PASS, machine, "TimeZone").unwrap_or("Pacific Standard Time");
    registry.set("HKLM\\SYSTEM\\CurrentControlSet\\Control\\TimeZoneInformation", "Name", zone);
    if let Some(join) = answers.component(PASS, "Microsoft-Windows-UnattendedJoin") {
        domain::join(join, registry)?;
    }
    say!("computer {name}, time zone {zone}");
    registry.set(SETUP, "Phase", OOBE);
    shell.registry.write(Path::new(C))?;
    say!("specialize restarts the machine");
    drives::restart()
}
