//! The pass specialize: the identity of the computer, and what Windows does for all users.

use super::release::Release;
use super::report::{Report, command};
use super::script::reg_number;
use super::windows_pe::{model, organization};
use super::xml::{Element, group, secret, text};
use super::{Answers, Membership, commands, component, component_of, item, locale};

/// The component that joins a domain or a workgroup.
pub(super) const JOIN: &str = "Microsoft-Windows-UnattendedJoin";
/// The firewall's rules for remote desktops, in any language.
const REMOTE_DESKTOP: &str = "@FirewallAPI.dll,-28752";

pub(super) fn components(answers: &Answers) -> Vec<Element> {
    let release = answers.release;
    let nla = u32::from(!answers.as_reference);
    let mut all = vec![
        component("Microsoft-Windows-Security-SPP-UX", vec![text("SkipAutoActivation", true)]),
        component("Microsoft-Windows-Shell-Setup", shell(answers)),
        component("Microsoft-Windows-ErrorReportingCore", vec![text("DisableWER", 1)]),
    ];
    let name = "Microsoft-Windows-IE-InternetExplorer";
    let home = if answers.as_reference { "https://google.com" } else { "about:blank" };
    all.extend(["amd64", "wow64"].map(|it| component_of(it, name, browser(home))));
    all.push(component("Microsoft-Windows-SQMApi", vec![text("CEIPEnabled", 0)]));
    if release.is_client() || answers.as_reference {
        all.push(component("Microsoft-Windows-SystemRestore-Main", vec![text("DisableSR", 1)]));
    }
    all.push(component("Microsoft-Windows-International-Core", locale::settings(&answers.locale)));
    let list = commands("RunSynchronous", "RunSynchronousCommand", "Path", &steps(answers));
    all.push(component("Microsoft-Windows-Deployment", vec![list]));
    if !release.is_client() {
        let closed = text("DoNotOpenServerManagerAtLogon", true);
        all.push(component("Microsoft-Windows-ServerManager-SvrMgrNc", vec![closed]));
    }
    all.extend([
        component(
            "Microsoft-Windows-TerminalServices-LocalSessionManager",
            vec![text("fDenyTSConnections", false)],
        ),
        component(
            "Microsoft-Windows-TerminalServices-RDP-WinStationExtensions",
            vec![text("UserAuthentication", nla)],
        ),
        component("Networking-MPSSVC-Svc", vec![firewall()]),
    ]);
    all.extend(join(answers));
    all
}

fn shell(answers: &Answers) -> Vec<Element> {
    let computer = answers.computer.as_deref().unwrap_or("*");
    let model = model(answers);
    let mut maker = vec![text("Manufacturer", organization(answers)), text("Model", model)];
    if answers.as_reference {
        maker.extend([
            text("SupportHours", "24/7"),
            text("SupportProvider", organization(answers)),
            text("SupportURL", "https://github.com/dockur/windows/issues"),
        ]);
    }
    let mut settings = vec![
        text("ComputerName", computer),
        group("OEMInformation", maker),
        text("OEMName", model),
    ];
    settings.extend(answers.locale.zone.map(|zone| text("TimeZone", zone)));
    settings
}

fn browser(home: &str) -> Vec<Element> {
    vec![
        text("DisableAccelerators", true),
        text("DisableFirstRunWizard", true),
        text("Home_Page", home),
        text("Help_Page", "about:blank"),
    ]
}

fn firewall() -> Element {
    let group_settings =
        vec![text("Active", true), text("Profile", "all"), text("Group", REMOTE_DESKTOP)];
    let rules = item("FirewallGroup", group_settings).with("wcm:keyValue", "RemoteDesktop");
    group("FirewallGroups", vec![rules])
}

/// Joins a domain with the account that Windows logs on, or a workgroup.
pub(super) fn join(answers: &Answers) -> Option<Element> {
    let settings = match &answers.membership {
        Membership::Default => return None,
        Membership::Workgroup(name) => vec![text("JoinWorkgroup", name)],
        Membership::Domain { name, unit } => {
            let user = &answers.account.user;
            // `user@domain` names its domain already.
            let domain = (!user.contains('@')).then(|| text("Domain", name));
            let password = secret("Password", answers.account.password.0.clone());
            let named = [text("Username", user), password];
            let credentials = domain.into_iter().chain(named).collect();
            let mut settings = vec![group("Credentials", credentials), text("JoinDomain", name)];
            settings.extend(unit.as_ref().map(|unit| text("MachineObjectOU", unit)));
            settings
        }
    };
    Some(component(JOIN, vec![group("Identification", settings)]))
}

/// Values of the default user's content delivery that show advertisements or install programs.
const DELIVERIES: [&str; 16] = [
    "ContentDeliveryAllowed",
    "FeatureManagementEnabled",
    "OEMPreInstalledAppsEnabled",
    "PreInstalledAppsEnabled",
    "PreInstalledAppsEverEnabled",
    "SilentInstalledAppsEnabled",
    "SoftLandingEnabled",
    "SubscribedContentEnabled",
    "SubscribedContent-310093Enabled",
    "SubscribedContent-338387Enabled",
    "SubscribedContent-338388Enabled",
    "SubscribedContent-338389Enabled",
    "SubscribedContent-338393Enabled",
    "SubscribedContent-353694Enabled",
    "SubscribedContent-353698Enabled",
    "SystemPaneSuggestionsEnabled",
];

/// Policies against content that Microsoft suggests.
const CONTENTS: [&str; 3] = [
    "DisableCloudOptimizedContent",
    "DisableWindowsConsumerFeatures",
    "DisableConsumerAccountStateContent",
];

/// Commands that run as the system, before the first start.
fn steps(answers: &Answers) -> Vec<String> {
    const NETWORK: &str = concat!(
        r"HKLM\SOFTWARE\Policies\Microsoft\Windows NT\CurrentVersion",
        r"\NetworkList\Signatures\FirstNetwork"
    );
    const CLOCK: &str = r"HKLM\SYSTEM\CurrentControlSet\Control\TimeZoneInformation";
    const OOBE: &str = r"HKLM\SOFTWARE\Microsoft\Windows\CurrentVersion\OOBE";
    const DELIVERY: &str =
        r"HKU\mount\Software\Microsoft\Windows\CurrentVersion\ContentDeliveryManager";
    const CLOUD: &str = r"Software\Policies\Microsoft\Windows\CloudContent";
    let mut steps = vec![command(Report::Specialize)];
    if answers.release == Release::Windows11 {
        steps.push(reg_number(OOBE, "BypassNRO", 1));
    }
    if answers.locale.universal_clock {
        steps.push(reg_number(CLOCK, "RealTimeIsUniversal", 1));
    }
    // The network is private, so that Windows asks nobody for its kind.
    steps.push(reg_number(NETWORK, "Category", 1));
    if matches!(answers.release, Release::Windows10 | Release::Windows11) {
        steps.push(r#"reg.exe load "HKU\mount" "C:\Users\Default\NTUSER.DAT""#.to_owned());
        steps.extend(DELIVERIES.map(|name| reg_number(DELIVERY, name, 0)));
        for hive in ["HKU\\mount", "HKLM"] {
            let key = format!("{hive}\\{CLOUD}");
            steps.extend(CONTENTS.map(|name| reg_number(&key, name, 1)));
        }
        steps.push(r#"reg.exe unload "HKU\mount""#.to_owned());
    }
    steps
}
