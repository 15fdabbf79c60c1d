//! The pass oobeSystem, and every start of Windows after it.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::thread;

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::answers;
use super::console::say;
use super::drivers::Package;
use super::drives::{self, C};
use super::registry::{DONE, NAME, REMOTE, Registry, SETUP};
use super::shell::Shell;
use super::xml::Element;
use super::{desktop, domain, files, network, programs};

const PASS: &str = "oobeSystem";
const SETUP_COMPLETE: &str = "C:\\Windows\\Setup\\Scripts\\SetupComplete.cmd";
const LOGON: &str = "HKLM\\SOFTWARE\\Microsoft\\Windows NT\\CurrentVersion\\Winlogon";
/// Pages that nobody is there to answer.
const HIDDEN: [&str; 3] = ["HideEULAPage", "HideOnlineAccountScreens", "HideWirelessSetupInOOBE"];

/// The first start for a user.
pub(crate) fn run(mut registry: Registry, packages: &[Package]) -> anyhow::Result<()> {
    let answers = answers::kept(Path::new(C))?;
    let shell_setup = answers.component(PASS, "Microsoft-Windows-Shell-Setup");
    let shell_setup = shell_setup.context("Windows asks for the user's account")?;
    for page in HIDDEN {
        ensure!(shell_setup.is(&format!("OOBE/{page}")), "Windows shows a page: no {page}");
    }
    serve(&registry, packages)?;
    let users = accounts(shell_setup, &registry)?;
    registry.set(SETUP, "Phase", DONE);
    let mut shell = Shell::new(Path::new(C), registry);
    if files::below(Path::new(C), &SETUP_COMPLETE[3..]).is_file() {
        let status = shell.run(&format!("cmd.exe /c \"{SETUP_COMPLETE}\""));
        say!("SetupComplete.cmd ended: {status}");
    }
    shell.registry.write(Path::new(C))?;
    if logs_on(shell_setup, &users, &mut shell.registry)? {
        let list = shell_setup.at("FirstLogonCommands");
        for command in answers::commands(list, "CommandLine")? {
            let status = shell.run(&command);
            say!("first logon command ended: {status}");
        }
    }
    say!("{} lines of scripts ran, {} unknown", shell.lines(), shell.unknown());
    shell.registry.write(Path::new(C))?;
    drop(shell);
    wait()
}

/// Every later start.
pub(crate) fn start(registry: &Registry, packages: &[Package]) -> anyhow::Result<()> {
    serve(registry, packages)?;
    if let Some(user) = registry.get(LOGON, "DefaultUserName") {
        say!("{user} is logged on");
    }
    wait()
}

/// Starts the services.
fn serve(registry: &Registry, packages: &[Package]) -> anyhow::Result<()> {
    network::start(registry.get(NAME, "ComputerName").unwrap_or_default());
    if !registry.is_set(REMOTE, "fDenyTSConnections") {
        desktop::start(registry.is_set(REMOTE, "UserAuthentication"))?;
    }
    if registry.is_set(programs::SERVICES, programs::AGENT) {
        programs::start_agent(packages)?;
    }
    button()
}

/// Makes the accounts, and returns their names and passwords.
fn accounts(shell_setup: &Element, registry: &Registry) -> anyhow::Result<Vec<(String, String)>> {
    let mut users = domain::accounts(shell_setup, registry)?;
    let list = shell_setup.at("UserAccounts/LocalAccounts");
    for account in list.into_iter().flat_map(|list| &list.children) {
        let name = account.value("Name").context("an account without a name")?;
        let group = account.value("Group").unwrap_or("Users");
        let password = password(account.at("Password"), "Password")?;
        // The rehearsal's only secrets are those of its tests.
        let shown = password.escape_default();
        say!("account {name:?} in {group} has the password {shown}");
        fs::create_dir_all(files::below(Path::new(C), &format!("Users\\{name}")))?;
        users.push((name.to_owned(), password));
    }
    if let Some(administrator) = shell_setup.at("UserAccounts/AdministratorPassword") {
        let password = password(Some(administrator), "AdministratorPassword")?;
        users.push(("Administrator".into(), password));
    }
    ensure!(!users.is_empty(), "Windows asks for the user's account");
    Ok(users)
}

/// The password in an element. One that is not in plain text is in base64, in UTF-16, and has the
/// name of the element at its end.
fn password(element: Option<&Element>, name: &str) -> anyhow::Result<String> {
    let Some(element) = element else { return Ok(String::new()) };
    let value = element.value("Value").unwrap_or_default();
    if element.is("PlainText") {
        return Ok(value.to_owned());
    }
    let bytes = STANDARD.decode(value).context("a password is not in base64")?;
    ensure!(bytes.len().is_multiple_of(2), "a password is not in UTF-16");
    let units = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let text: Result<String, _> = char::decode_utf16(units).collect();
    let text = text.context("a password is not in UTF-16")?;
    text.strip_suffix(name).map(str::to_owned).with_context(|| format!("no {name} at its end"))
}

/// Whether a user is logged on without being there.
fn logs_on(
    shell_setup: &Element,
    users: &[(String, String)],
    registry: &mut Registry,
) -> anyhow::Result<bool> {
    let Some(logon) = shell_setup.at("AutoLogon").filter(|it| it.is("Enabled")) else {
        say!("nobody is logged on");
        return Ok(false);
    };
    let name = logon.value("Username").unwrap_or_default();
    let domain = logon.value("Domain").map(|domain| format!("{domain}\\")).unwrap_or_default();
    let name = format!("{domain}{name}");
    let password = password(logon.at("Password"), "Password")?;
    let known = users.iter().any(|(user, it)| user.eq_ignore_ascii_case(&name) && *it == password);
    ensure!(known, "{name}: the user name or password is incorrect");
    registry.set(LOGON, "DefaultUserName", &name);
    say!("{name} is logged on");
    Ok(true)
}

/// Shuts Windows down when the power button is pressed.
fn button() -> anyhow::Result<()> {
    for entry in fs::read_dir("/sys/class/input")?.flatten() {
        let name = fs::read_to_string(entry.path().join("device/name")).unwrap_or_default();
        let event = entry.file_name().to_string_lossy().into_owned();
        if name.trim() != "Power Button" || !event.starts_with("event") {
            continue;
        }
        let mut events = fs::File::open(format!("/dev/input/{event}"))?;
        thread::spawn(move || {
            let mut pressed = [0; 24];
            if events.read_exact(&mut pressed).is_ok() {
                say!("the power button was pressed");
                drives::power_off().ok();
            }
        });
        return Ok(());
    }
    bail!("no power button")
}

fn wait() -> anyhow::Result<()> {
    loop {
        thread::park();
    }
}

#[cfg(test)]
mod test {
    use super::super::xml::parse;
    use super::*;

    #[test]
    fn passwords_end_with_the_name_of_their_element() {
        let of = |value: &str, plain: bool| {
            let text = format!("<P><Value>{value}</Value><PlainText>{plain}</PlainText></P>");
            password(Some(&parse(&text).unwrap()), "Password")
        };
        let gates = "ZwBhAHQAZQBzAFAAYQBzAHMAdwBvAHIAZAA=";
        assert_eq!(of(gates, false).unwrap(), "gates");
        assert_eq!(of(gates, true).unwrap(), gates);
        assert!(of("ZwBhAHQAZQBzAA==", false).is_err());
        assert!(of("gates", false).is_err());
    }
}
