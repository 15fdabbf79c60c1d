//! The schema of answer files, as far as we use it: components with their passes, settings with
//! their order and types (Microsoft: Unattended Windows Setup Reference).

use anyhow::{Context as _, bail, ensure};

use super::xml::{self, Element};

/// Identity of all components of Windows.
pub(super) const TOKEN: &str = "31bf3856ad364e35";

/// The configuration passes, in the order in which Setup runs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pass {
    WindowsPe,
    OfflineServicing,
    Generalize,
    Specialize,
    OobeSystem,
}

impl Pass {
    pub(super) const ALL: [Self; 5] = [
        Self::WindowsPe,
        Self::OfflineServicing,
        Self::Generalize,
        Self::Specialize,
        Self::OobeSystem,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::WindowsPe => "windowsPE",
            Self::OfflineServicing => "offlineServicing",
            Self::Generalize => "generalize",
            Self::Specialize => "specialize",
            Self::OobeSystem => "oobeSystem",
        }
    }
}

struct Component {
    name: &'static str,
    passes: &'static [Pass],
    settings: &'static [Setting],
}

struct Setting {
    name: &'static str,
    kind: Kind,
}

enum Kind {
    Bool,
    Number(u32, u32),
    /// At least one character, and at most this many.
    Text(usize),
    /// One of these words.
    Word(&'static [&'static str]),
    /// Settings in this order.
    Group(&'static [Setting]),
    /// Items of this name, each with these settings.
    List(&'static str, &'static [Setting]),
    /// A single item that its parent may have several of.
    Item(&'static [Setting]),
}

use Kind::{Bool, Group, Item, List, Number, Text, Word};

const fn set(name: &'static str, kind: Kind) -> Setting {
    Setting { name, kind }
}

/// Maximum lengths of command lines, in characters.
pub(super) const MAX_PATH: usize = 259;
pub(super) const MAX_COMMAND: usize = 1024;

const ANY: Kind = Text(256);
const ORDER: Setting = set("Order", Number(1, 500));
const DISK_ID: Setting = set("DiskID", Number(0, 64));
const PARTITION_ID: Setting = set("PartitionID", Number(1, 128));
const SHOW_UI: Setting = set("WillShowUI", Word(&["Always", "Never", "OnError"]));
const PASSWORD: Kind = Group(&[set("Value", Text(1024)), set("PlainText", Bool)]);
const COMMANDS: Kind =
    List("RunSynchronousCommand", &[ORDER, set("Path", Text(MAX_PATH)), set("Description", ANY)]);
const LOCALES: &[Setting] = &[
    set("InputLocale", Text(200)),
    set("SystemLocale", Text(35)),
    set("UILanguage", Text(35)),
    set("UserLocale", Text(35)),
];
const CREATE: &[Setting] = &[
    ORDER,
    set("Type", Word(&["EFI", "MSR", "Primary"])),
    set("Size", Number(1, u32::MAX)),
    set("Extend", Bool),
];
const MODIFY: &[Setting] = &[
    ORDER,
    PARTITION_ID,
    set("Label", Text(32)),
    set("Letter", Text(1)),
    set("Format", Word(&["FAT32", "NTFS"])),
];
const INSTALL_FROM: &[Setting] = &[set(
    "MetaData",
    Item(&[set("Key", Word(&["/IMAGE/INDEX", "/IMAGE/NAME"])), set("Value", ANY)]),
)];
const OS_IMAGE: &[Setting] = &[
    set("InstallFrom", Group(INSTALL_FROM)),
    set("InstallTo", Group(&[DISK_ID, PARTITION_ID])),
    SHOW_UI,
    set("InstallToAvailablePartition", Bool),
];
const SETUP: &[Setting] = &[
    set(
        "DiskConfiguration",
        Group(&[
            set(
                "Disk",
                Item(&[
                    DISK_ID,
                    set("WillWipeDisk", Bool),
                    set("CreatePartitions", List("CreatePartition", CREATE)),
                    set("ModifyPartitions", List("ModifyPartition", MODIFY)),
                ]),
            ),
            SHOW_UI,
        ]),
    ),
    set("ImageInstall", Group(&[set("OSImage", Group(OS_IMAGE))])),
    set("DynamicUpdate", Group(&[set("Enable", Bool), SHOW_UI])),
    set("UpgradeData", Group(&[set("Upgrade", Bool), SHOW_UI])),
    set("UseConfigurationSet", Bool),
    set(
        "UserData",
        Group(&[
            set("AcceptEula", Bool),
            set("FullName", Text(63)),
            set("Organization", Text(63)),
            set("ProductKey", Group(&[set("Key", Text(29)), SHOW_UI])),
        ]),
    ),
    set("EnableFirewall", Bool),
    set("Diagnostics", Group(&[set("OptIn", Bool)])),
    set("RunSynchronous", COMMANDS),
];
const SHELL: &[Setting] = &[
    set("ComputerName", Text(15)),
    set(
        "OEMInformation",
        Group(&[
            set("Manufacturer", ANY),
            set("Model", ANY),
            set("SupportHours", ANY),
            set("SupportProvider", ANY),
            set("SupportURL", ANY),
        ]),
    ),
    set("OEMName", ANY),
    set("TimeZone", Text(64)),
    set(
        "UserAccounts",
        Group(&[
            set(
                "LocalAccounts",
                List(
                    "LocalAccount",
                    &[set("Name", Text(20)), set("Group", ANY), set("Password", PASSWORD)],
                ),
            ),
            set(
                "DomainAccounts",
                List(
                    "DomainAccountList",
                    &[
                        set("DomainAccount", Item(&[set("Name", ANY), set("Group", ANY)])),
                        set("Domain", ANY),
                    ],
                ),
            ),
            set("AdministratorPassword", PASSWORD),
        ]),
    ),
    set(
        "AutoLogon",
        Group(&[
            set("Username", ANY),
            set("Domain", ANY),
            set("Enabled", Bool),
            set("LogonCount", Number(1, u32::MAX)),
            set("Password", PASSWORD),
        ]),
    ),
    set(
        "Display",
        Group(&[
            set("ColorDepth", Number(8, 32)),
            set("HorizontalResolution", Number(320, 16384)),
            set("VerticalResolution", Number(200, 16384)),
        ]),
    ),
    set("OOBE", Group(OOBE)),
    set("RegisteredOrganization", ANY),
    set("RegisteredOwner", ANY),
    set(
        "FirstLogonCommands",
        List(
            "SynchronousCommand",
            &[ORDER, set("CommandLine", Text(MAX_COMMAND)), set("Description", ANY)],
        ),
    ),
];
const OOBE: &[Setting] = &[
    set("HideEULAPage", Bool),
    set("HideLocalAccountScreen", Bool),
    set("HideOEMRegistrationScreen", Bool),
    set("HideOnlineAccountScreens", Bool),
    set("HideWirelessSetupInOOBE", Bool),
    set("NetworkLocation", Word(&["Home", "Work", "Other"])),
    set("ProtectYourPC", Number(1, 3)),
    set("SkipUserOOBE", Bool),
    set("SkipMachineOOBE", Bool),
];
const BROWSER: &[Setting] = &[
    set("DisableAccelerators", Bool),
    set("DisableFirstRunWizard", Bool),
    set("Home_Page", ANY),
    set("Help_Page", ANY),
];
const FIREWALL: &[Setting] = &[set(
    "FirewallGroups",
    List(
        "FirewallGroup",
        &[
            set("Active", Bool),
            set("Profile", Word(&["all", "domain", "private", "public"])),
            set("Group", ANY),
        ],
    ),
)];
const JOIN: &[Setting] = &[set(
    "Identification",
    Group(&[
        set(
            "Credentials",
            Group(&[set("Domain", ANY), set("Username", ANY), set("Password", ANY)]),
        ),
        set("JoinDomain", ANY),
        set("JoinWorkgroup", Text(15)),
        set("MachineObjectOU", Text(1024)),
    ]),
)];

const SPECIALIZE: &[Pass] = &[Pass::Specialize];
const OOBE_SYSTEM: &[Pass] = &[Pass::OobeSystem];

const fn component(
    name: &'static str,
    passes: &'static [Pass],
    settings: &'static [Setting],
) -> Component {
    Component { name, passes, settings }
}

const COMPONENTS: &[Component] = &[
    component(
        "Microsoft-Windows-International-Core-WinPE",
        &[Pass::WindowsPe],
        &[
            set("SetupUILanguage", Group(&[set("UILanguage", Text(35))])),
            set("InputLocale", Text(200)),
            set("SystemLocale", Text(35)),
            set("UILanguage", Text(35)),
            set("UserLocale", Text(35)),
        ],
    ),
    component("Microsoft-Windows-Setup", &[Pass::WindowsPe], SETUP),
    component(
        "Microsoft-Windows-LUA-Settings",
        &[Pass::OfflineServicing],
        &[set("EnableLUA", Bool)],
    ),
    component(
        "Microsoft-Windows-PnPSysprep",
        &[Pass::Generalize],
        &[set("PersistAllDeviceInstalls", Bool)],
    ),
    component(
        "Microsoft-Windows-Security-SPP",
        &[Pass::Generalize],
        &[set("SkipRearm", Number(0, 1))],
    ),
    component("Microsoft-Windows-Security-SPP-UX", SPECIALIZE, &[set("SkipAutoActivation", Bool)]),
    component("Microsoft-Windows-Shell-Setup", &[Pass::Specialize, Pass::OobeSystem], SHELL),
    component(
        "Microsoft-Windows-ErrorReportingCore",
        SPECIALIZE,
        &[set("DisableWER", Number(0, 1))],
    ),
    component("Microsoft-Windows-IE-InternetExplorer", SPECIALIZE, BROWSER),
    component("Microsoft-Windows-SQMApi", SPECIALIZE, &[set("CEIPEnabled", Number(0, 1))]),
    component(
        "Microsoft-Windows-SystemRestore-Main",
        SPECIALIZE,
        &[set("DisableSR", Number(0, 1))],
    ),
    component(
        "Microsoft-Windows-International-Core",
        &[Pass::Specialize, Pass::OobeSystem],
        LOCALES,
    ),
    component("Microsoft-Windows-Deployment", SPECIALIZE, &[set("RunSynchronous", COMMANDS)]),
    component(
        "Microsoft-Windows-ServerManager-SvrMgrNc",
        SPECIALIZE,
        &[set("DoNotOpenServerManagerAtLogon", Bool)],
    ),
    component(
        "Microsoft-Windows-TerminalServices-LocalSessionManager",
        SPECIALIZE,
        &[set("fDenyTSConnections", Bool)],
    ),
    component(
        "Microsoft-Windows-TerminalServices-RDP-WinStationExtensions",
        SPECIALIZE,
        &[set("UserAuthentication", Number(0, 1))],
    ),
    component("Networking-MPSSVC-Svc", SPECIALIZE, FIREWALL),
    component("Microsoft-Windows-UnattendedJoin", SPECIALIZE, JOIN),
    component(
        "Microsoft-Windows-EnhancedStorage-Adm",
        OOBE_SYSTEM,
        &[set("TCGSecurityActivationDisabled", Number(0, 1))],
    ),
    component(
        "Microsoft-Windows-SecureStartup-FilterDriver",
        OOBE_SYSTEM,
        &[set("PreventDeviceEncryption", Bool)],
    ),
];

/// Checks an answer file against the table: every component in a pass that has it, every setting
/// in its place and of its type.
///
/// # Errors
///
/// The path of the setting and the reason, without its value, which may be secret.
pub(super) fn validate(root: &Element) -> anyhow::Result<()> {
    ensure!(root.name == "unattend", "the answer file is not an <unattend>");
    let mut last = None;
    for settings in root.children() {
        let name = settings.attribute("pass").unwrap_or_default();
        let pass = Pass::ALL.into_iter().find(|pass| pass.name() == name);
        let pass = pass.with_context(|| format!("the pass {name} is unknown"))?;
        ensure!(settings.name == "settings" && last < Some(pass), "{name}: the pass is misplaced");
        last = Some(pass);
        check_pass(settings, pass).with_context(|| name.to_owned())?;
    }
    ensure!(last.is_some(), "the answer file has no passes");
    Ok(())
}

fn check_pass(settings: &Element, pass: Pass) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    for found in settings.children() {
        let attribute = |name: &str| found.attribute(name).unwrap_or_default();
        let name = attribute("name");
        let known = COMPONENTS.iter().find(|it| it.name == name && it.passes.contains(&pass));
        let known = known.with_context(|| format!("{name} is not a component of this pass"))?;
        let architecture = attribute("processorArchitecture");
        let identity = (attribute("publicKeyToken"), attribute("language"));
        ensure!(
            found.name == "component"
                && ["amd64", "wow64"].contains(&architecture)
                && identity == (TOKEN, "neutral")
                && attribute("versionScope") == "nonSxS",
            "{name}: the identity of the component is incomplete"
        );
        ensure!(!seen.contains(&(name, architecture)), "{name} is there twice");
        seen.push((name, architecture));
        ensure!(!found.children().is_empty(), "{name} has no settings");
        check_all(found, known.settings).with_context(|| name.to_owned())?;
    }
    Ok(())
}

/// Checks that the children are some of these settings, in this order.
fn check_all(parent: &Element, settings: &[Setting]) -> anyhow::Result<()> {
    let mut at = 0;
    for child in parent.children() {
        let place = settings.iter().position(|it| it.name == child.name);
        let place = place.with_context(|| format!("{} is not a setting here", child.name))?;
        let is_item = matches!(settings[place].kind, Item(_));
        let in_order = place >= at;
        ensure!(in_order, "{} is out of order, or there twice", child.name);
        at = if is_item { place } else { place + 1 };
        check_one(child, &settings[place].kind).with_context(|| child.name.clone())?;
    }
    Ok(())
}

fn check_one(found: &Element, kind: &Kind) -> anyhow::Result<()> {
    match kind {
        Group(settings) => return check_all(found, settings),
        Item(settings) => return check_item(found, settings),
        List(name, settings) => {
            ensure!(!found.children().is_empty(), "the list is empty");
            for item in found.children() {
                ensure!(item.name == *name, "{} is not an item of this list", item.name);
                check_item(item, settings).with_context(|| item.name.clone())?;
            }
            return check_orders(found);
        }
        _ => {}
    }
    let text = found.text().context("it has settings where a value belongs")?;
    xml::check(text)?;
    match kind {
        Bool => ensure!(["true", "false"].contains(&text), "it is neither true nor false"),
        Number(min, max) => {
            let number = text.parse::<u32>().ok().filter(|it| (min..=max).contains(&it));
            ensure!(number.is_some(), "it is not a number from {min} to {max}");
        }
        Text(max) => {
            let length = text.chars().count();
            ensure!(length <= *max, "it has {length} characters: give at most {max}");
            ensure!(length > 0, "it is empty: leave it out");
        }
        Word(words) => ensure!(words.contains(&text), "it is none of {}", words.join(", ")),
        Group(_) | Item(_) | List(..) => bail!("it has a value where settings belong"),
    }
    Ok(())
}

/// Items of lists say that they are added.
fn check_item(item: &Element, settings: &[Setting]) -> anyhow::Result<()> {
    ensure!(item.attribute("wcm:action") == Some("add"), "wcm:action is missing");
    check_all(item, settings)
}

/// Items with an order are numbered from 1.
fn check_orders(list: &Element) -> anyhow::Result<()> {
    let is_order = |it: &&Element| it.name == "Order";
    let orders = list.children().iter().filter_map(|item| item.children().iter().find(is_order));
    for (number, order) in (1..).zip(orders) {
        let number: u32 = number;
        ensure!(order.text() == Some(&number.to_string()), "the items are not numbered from 1");
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::super::parse::tree;
    use super::super::xml::{UNATTEND, WCM};
    use super::*;

    /// An answer file with one component in one pass.
    fn file(pass: &str, component: &str, settings: &str) -> String {
        format!(
            "<unattend xmlns=\"{UNATTEND}\" xmlns:wcm=\"{WCM}\"><settings pass=\"{pass}\">\
             <component name=\"{component}\" processorArchitecture=\"amd64\" \
             publicKeyToken=\"{TOKEN}\" language=\"neutral\" versionScope=\"nonSxS\">{settings}\
             </component></settings></unattend>"
        )
    }

    fn verdict(pass: &str, component: &str, settings: &str) -> Result<(), String> {
        let file = tree(&file(pass, component, settings)).unwrap();
        validate(&file).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn settings_have_a_place_an_order_and_a_type() {
        let setup = "Microsoft-Windows-Setup";
        let good = "<UseConfigurationSet>true</UseConfigurationSet>\
                    <UserData><AcceptEula>true</AcceptEula></UserData>";
        assert_eq!(verdict("windowsPE", setup, good), Ok(()));
        let data = "<UserData><AcceptEula>true</AcceptEula></UserData>";
        for (pass, settings, reason) in [
            ("specialize", good, "not a component of this pass"),
            ("auditUser", good, "is unknown"),
            ("windowsPE", "", "has no settings"),
            ("windowsPE", "<Nonsense>1</Nonsense>", "not a setting here"),
            (
                "windowsPE",
                &format!("{data}<UseConfigurationSet>true</UseConfigurationSet>"),
                "out of order",
            ),
            ("windowsPE", &format!("{data}{data}"), "out of order, or there twice"),
            ("windowsPE", "<EnableFirewall>yes</EnableFirewall>", "neither true nor false"),
            ("windowsPE", "<EnableFirewall><a/></EnableFirewall>", "where a value belongs"),
            ("windowsPE", "<UserData><FullName></FullName></UserData>", "it is empty"),
            ("windowsPE", "<RunSynchronous/>", "the list is empty"),
        ] {
            let error = verdict(pass, setup, settings).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn items_are_added_and_numbered() {
        let item = |action: &str, order: u32| {
            format!(
                "<RunSynchronousCommand {action}><Order>{order}</Order><Path>x</Path>\
                 </RunSynchronousCommand>"
            )
        };
        let verdict = |items: &str| {
            let list = format!("<RunSynchronous>{items}</RunSynchronous>");
            verdict("specialize", "Microsoft-Windows-Deployment", &list)
        };
        let add = "wcm:action=\"add\"";
        assert_eq!(verdict(&(item(add, 1) + &item(add, 2))), Ok(()));
        assert!(verdict(&item("", 1)).unwrap_err().contains("wcm:action"));
        assert!(verdict(&item(add, 2)).unwrap_err().contains("numbered"));
        assert!(verdict(&item(add, 0)).unwrap_err().contains("from 1 to 500"));
        let long = item(add, 1).replace(">x<", &format!(">{}<", "x".repeat(MAX_PATH + 1)));
        assert!(verdict(&long).unwrap_err().contains("at most 259"));
    }
}
