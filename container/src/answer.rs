//! Answer files and scripts for Windows Setup, generated from the settings.
//!
//! [`files`] returns all files of the set-up disk that depend on the settings. Only
//! [`custom`] reads files: answer files of the user.

pub mod custom;
pub mod from_settings;
mod install;
mod locale;
mod oobe;
pub mod parse;
pub mod release;
pub mod report;
mod schema;
mod script;
mod setup_complete;
mod setup_log;
mod specialize;
pub mod target;
mod windows_pe;
mod windows_pe_script;
pub mod xml;
pub mod zones;

use anyhow::Context as _;

use self::release::{Image, Release};
use self::schema::{Pass, TOKEN};
use self::xml::{Element, Secrets, group, text};
use crate::settings::Installer;
use crate::settings::value::Secret;
use crate::settings::words::ProductKey;

/// The answers to the questions of Windows Setup, and further settings of the installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    pub release: Release,
    pub image: Image,
    pub locale: Locale,
    pub account: Account,
    pub membership: Membership,
    /// Name of the computer. By default Windows makes a random one.
    pub computer: Option<String>,
    /// Width and height in pixels.
    pub screen: (u32, u32),
    pub finish: Finish,
    pub machine: Machine,
    pub installer: Installer,
    /// Follows the reference image where its settings are less safe than ours.
    pub as_reference: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locale {
    /// Language of Windows, which the medium must have.
    pub language: String,
    /// Culture of dates and numbers.
    pub region: String,
    /// Keyboard layout: a culture, or numbers of a language and a layout.
    pub keyboard: String,
    /// Windows' name of the time zone. Without one, Windows chooses.
    pub zone: Option<&'static str>,
    /// The machine's clock is in UTC, not in that time zone.
    pub universal_clock: bool,
}

/// The account that Windows logs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub user: String,
    pub password: Secret,
    pub autologin: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Membership {
    Default,
    Workgroup(String),
    /// An Active Directory domain, and the organizational unit of the computer in it.
    Domain {
        name: String,
        unit: Option<String>,
    },
}

/// Steps at the end of the installation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finish {
    pub key: Option<ProductKey>,
    /// A command that follows the user's `install.bat`.
    pub command: Option<String>,
    /// Keeps the output of `install.bat`.
    pub log: bool,
    /// The first shared folder becomes a drive and a link on the desktop.
    pub share: bool,
}

/// The properties of the machine on which the answers depend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Number of the system disk in Windows PE. The set-up disk is number 0 if Windows needs a
    /// driver for the system disk, because that disk appears later.
    pub disk: u32,
    /// Requirements of Windows 11 that the machine does not meet.
    pub lacks: Lacks,
}

/// Requirements that a machine does not meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacks {
    pub tpm: bool,
    pub secure_boot: bool,
    pub memory: bool,
    pub disk: bool,
    pub processors: bool,
}

/// A file of the set-up disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupFile {
    /// The path on the disk, with slashes.
    pub path: &'static str,
    pub bytes: Vec<u8>,
}

impl SetupFile {
    /// The name without its folders.
    pub fn name(&self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

pub const AUTOUNATTEND: &str = "Autounattend.xml";
/// Path of the script that installs without Windows Setup.
pub const INSTALL_SCRIPT: &str = "transom.cmd";
const SETUP_COMPLETE: &str = "$OEM$/$$/Setup/Scripts/SetupComplete.cmd";
const ERROR_HANDLER: &str = "$OEM$/$$/Setup/Scripts/ErrorHandler.cmd";
const RUN_INSTALL: &str = "$OEM$/$$/Setup/Scripts/RunInstall.cmd";
pub const INSTALL_BAT: &str = "$OEM$/$1/OEM/install.bat";

/// All files of the set-up disk that depend on the settings. `install_bat` is the user's file of
/// this name; COMMAND follows its text.
///
/// # Errors
///
/// If a setting cannot be in an answer file. The error names the place in the file.
pub fn files(
    answers: &Answers,
    install_bat: Option<&[u8]>,
    secrets: Secrets,
) -> anyhow::Result<Vec<SetupFile>> {
    let file = |path, text: String| SetupFile { path, bytes: text.into_bytes() };
    let mut files = vec![
        file(AUTOUNATTEND, autounattend(answers, secrets)?),
        file(SETUP_COMPLETE, setup_complete::text(answers, secrets)),
        file(RUN_INSTALL, install::runner(answers.finish.log)),
        file(ERROR_HANDLER, setup_log::text()),
    ];
    let script = install::install_bat(install_bat, answers.finish.command.as_deref());
    files.extend(script.map(|bytes| SetupFile { path: INSTALL_BAT, bytes }));
    if answers.installer == Installer::Script {
        files.push(file(INSTALL_SCRIPT, windows_pe_script::text(answers)));
    }
    Ok(files)
}

/// The answer file.
pub fn autounattend(answers: &Answers, secrets: Secrets) -> anyhow::Result<String> {
    let root = tree(answers);
    schema::validate(&root).context("the answer file cannot be made from these settings")?;
    Ok(xml::document(&root, secrets))
}

fn tree(answers: &Answers) -> Element {
    let passes = [
        (Pass::WindowsPe, windows_pe::components(answers)),
        (Pass::OfflineServicing, offline(answers)),
        (Pass::Generalize, generalize()),
        (Pass::Specialize, specialize::components(answers)),
        (Pass::OobeSystem, oobe::components(answers)),
    ];
    let passes = passes.into_iter().filter(|(_, components)| !components.is_empty());
    let settings =
        |(pass, components): (Pass, _)| group("settings", components).with("pass", pass.name());
    group("unattend", passes.map(settings).collect())
        .with("xmlns", xml::UNATTEND)
        .with("xmlns:wcm", xml::WCM)
}

/// Settings of a component of Windows, for programs of 64 bits.
fn component(name: &str, settings: Vec<Element>) -> Element {
    component_of("amd64", name, settings)
}

fn component_of(architecture: &str, name: &str, settings: Vec<Element>) -> Element {
    group("component", settings)
        .with("name", name)
        .with("processorArchitecture", architecture)
        .with("publicKeyToken", TOKEN)
        .with("language", "neutral")
        .with("versionScope", "nonSxS")
}

/// An item of a list.
fn item(name: &str, settings: Vec<Element>) -> Element {
    group(name, settings).with("wcm:action", "add")
}

/// A list of commands, numbered from 1.
fn commands(list: &str, name: &str, field: &str, commands: &[String]) -> Element {
    let numbered = (1..).zip(commands).map(|(number, command): (u32, _)| {
        item(name, vec![text("Order", number), text(field, command)])
    });
    group(list, numbered.collect())
}

fn offline(answers: &Answers) -> Vec<Element> {
    // User account control is on by default.
    match answers.as_reference {
        true => vec![component("Microsoft-Windows-LUA-Settings", vec![text("EnableLUA", false)])],
        false => Vec::new(),
    }
}

/// Keeps drivers and the state of the activation when the user generalizes the installation.
fn generalize() -> Vec<Element> {
    vec![
        component("Microsoft-Windows-PnPSysprep", vec![text("PersistAllDeviceInstalls", true)]),
        component("Microsoft-Windows-Security-SPP", vec![text("SkipRearm", 1)]),
    ]
}

#[cfg(test)]
mod test;
