//! The pass windowsPE: languages of Setup, disk, image, and requirements that Setup checks.

use super::release::{Release, Selection};
use super::report::{Report, command};
use super::script::reg_number;
use super::xml::{Element, group, text};
use super::{
    Answers, ERROR_HANDLER, INSTALL_SCRIPT, Lacks, Membership, commands, component, item, locale,
};
use crate::settings::Installer;

/// Sizes of the partitions for the firmware and for Windows' own use, in MiB.
pub(super) const EFI_SIZE: u32 = 128;
pub(super) const RESERVED_SIZE: u32 = 128;
/// Number of the partition with Windows.
pub(super) const WINDOWS_PARTITION: u32 = 3;

pub(super) fn components(answers: &Answers) -> Vec<Element> {
    let language = text("UILanguage", &answers.locale.language);
    let mut languages = vec![group("SetupUILanguage", vec![language])];
    languages.extend(locale::settings(&answers.locale));
    vec![
        component("Microsoft-Windows-International-Core-WinPE", languages),
        component("Microsoft-Windows-Setup", setup(answers)),
    ]
}

fn setup(answers: &Answers) -> Vec<Element> {
    let mut settings = Vec::new();
    // The script partitions the disk by itself.
    if answers.installer == Installer::Setup {
        settings.push(disk_configuration(answers.machine.disk));
        settings.push(image_install(answers));
    }
    settings.push(never("DynamicUpdate", "Enable"));
    settings.push(never("UpgradeData", "Upgrade"));
    settings.push(text("UseConfigurationSet", true));
    settings.push(user_data(answers));
    if answers.as_reference {
        settings.push(text("EnableFirewall", false));
    }
    settings.push(group("Diagnostics", vec![text("OptIn", false)]));
    let commands = before_setup(answers);
    if !commands.is_empty() {
        settings.push(self::commands("RunSynchronous", "RunSynchronousCommand", "Path", &commands));
    }
    settings
}

fn never(name: &str, switch: &str) -> Element {
    group(name, vec![text(switch, false), text("WillShowUI", "Never")])
}

/// An EFI system partition, one reserved for Windows, and the rest for Windows.
fn disk_configuration(disk: u32) -> Element {
    let create = |order: u32, kind: &str, size: Element| {
        item("CreatePartition", vec![text("Order", order), text("Type", kind), size])
    };
    let modify = |order: u32, mut settings: Vec<Element>| {
        settings.insert(0, text("Order", order));
        settings.insert(1, text("PartitionID", order));
        item("ModifyPartition", settings)
    };
    let created = vec![
        create(1, "EFI", text("Size", EFI_SIZE)),
        create(2, "MSR", text("Size", RESERVED_SIZE)),
        create(WINDOWS_PARTITION, "Primary", text("Extend", true)),
    ];
    let windows = vec![text("Label", "Windows"), text("Letter", "C"), text("Format", "NTFS")];
    let modified = vec![
        modify(1, vec![text("Label", "System"), text("Format", "FAT32")]),
        modify(2, Vec::new()),
        modify(WINDOWS_PARTITION, windows),
    ];
    let disk = item(
        "Disk",
        vec![
            text("DiskID", disk),
            text("WillWipeDisk", true),
            group("CreatePartitions", created),
            group("ModifyPartitions", modified),
        ],
    );
    group("DiskConfiguration", vec![disk])
}

fn image_install(answers: &Answers) -> Element {
    let image = &answers.image;
    let by = match image.selection {
        Selection::Index(index) => Some(("/IMAGE/INDEX", index.to_string())),
        Selection::Name => Some(("/IMAGE/NAME", image.name.clone())),
        Selection::Key => None,
    };
    let mut settings = Vec::new();
    if let Some((key, value)) = by {
        let data = item("MetaData", vec![text("Key", key), text("Value", &value)]);
        settings.push(group("InstallFrom", vec![data]));
    }
    let disk = text("DiskID", answers.machine.disk);
    let to = vec![disk, text("PartitionID", WINDOWS_PARTITION)];
    settings.push(group("InstallTo", to));
    settings.push(text("InstallToAvailablePartition", false));
    group("ImageInstall", vec![group("OSImage", settings)])
}

/// Without a key, the element must be missing: an empty one stops the setup of evaluation media.
fn user_data(answers: &Answers) -> Element {
    let mut settings = vec![
        text("AcceptEula", true),
        text("FullName", owner(answers)),
        text("Organization", model(answers)),
    ];
    if let Some(key) = answers.image.key {
        let key = vec![text("Key", key), text("WillShowUI", "OnError")];
        settings.push(group("ProductKey", key));
    }
    group("UserData", settings)
}

/// The registered owner. Names of domain accounts can be too long for it.
pub(super) fn owner(answers: &Answers) -> &str {
    match answers.membership {
        Membership::Domain { .. } if answers.as_reference => "Docker",
        Membership::Domain { .. } => organization(answers),
        _ => &answers.account.user,
    }
}

pub(super) fn organization(answers: &Answers) -> &'static str {
    if answers.as_reference { "Dockur" } else { "Transom" }
}

/// The name of this kind of computer.
pub(super) fn model(answers: &Answers) -> &'static str {
    if answers.as_reference { "Windows for Docker" } else { "Transom" }
}

/// Commands that run before Setup looks at the machine.
fn before_setup(answers: &Answers) -> Vec<String> {
    const LAB: &str = r"HKLM\SYSTEM\Setup\LabConfig";
    const UPGRADES: &str = r"HKLM\SYSTEM\Setup\MoSetup";
    let mut commands = Vec::new();
    if answers.installer == Installer::Setup {
        commands.push(call(&ERROR_HANDLER.replace('/', "\\"), " begin"));
        commands.push(command(Report::WindowsPe));
    }
    if answers.release == Release::Windows11 {
        let lacks = bypassed(answers);
        let checks = [
            ("BypassTPMCheck", lacks.tpm),
            ("BypassSecureBootCheck", lacks.secure_boot),
            ("BypassRAMCheck", lacks.memory),
            ("BypassStorageCheck", lacks.disk),
            ("BypassCPUCheck", lacks.processors),
        ];
        let checks = checks.into_iter().filter(|(_, lacking)| *lacking);
        commands.extend(checks.map(|(name, _)| reg_number(LAB, name, 1)));
        if lacks.tpm || lacks.processors {
            let name = "AllowUpgradesWithUnsupportedTPMOrCPU";
            commands.push(reg_number(UPGRADES, name, 1));
        }
    }
    if answers.installer == Installer::Script {
        commands.push(call(INSTALL_SCRIPT, ""));
    }
    commands
}

fn bypassed(answers: &Answers) -> Lacks {
    let lacks = answers.machine.lacks;
    match answers.as_reference {
        true => Lacks { tpm: true, secure_boot: true, memory: true, ..lacks },
        false => lacks,
    }
}

/// Calls a script of the set-up disk, whose letter is not known.
fn call(script: &str, argument: &str) -> String {
    let letters = "C D E F G H I J K L M N O P";
    let found = format!("%d:\\{script}");
    format!("cmd.exe /c for %d in ({letters}) do if exist {found} call {found}{argument}")
}
