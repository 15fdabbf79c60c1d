//! The pass oobeSystem: accounts, logon, screen, and the first commands of the user.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::release::Release;
use super::script::SCRIPTS;
use super::windows_pe::{model, organization, owner};
use super::xml::{Element, group, secret, text};
use super::{Account, Answers, Membership, commands, component, item, locale};

/// A number of logons that no installation reaches.
const LOGONS: u32 = 65432;
const COLOR_DEPTH: u32 = 32;
const ADMINISTRATORS: &str = "Administrators";

pub(super) fn components(answers: &Answers) -> Vec<Element> {
    // A disk that Windows encrypts by itself is lost with the TPM's state.
    let encryption = text("PreventDeviceEncryption", true);
    let activation = text("TCGSecurityActivationDisabled", 1);
    vec![
        component("Microsoft-Windows-SecureStartup-FilterDriver", vec![encryption]),
        component("Microsoft-Windows-EnhancedStorage-Adm", vec![activation]),
        component("Microsoft-Windows-International-Core", locale::settings(&answers.locale)),
        component("Microsoft-Windows-Shell-Setup", shell(answers)),
    ]
}

fn shell(answers: &Answers) -> Vec<Element> {
    let mut settings = vec![accounts(answers)];
    if answers.account.autologin {
        settings.push(logon(answers));
    }
    let (width, height) = answers.screen;
    settings.push(group(
        "Display",
        vec![
            text("ColorDepth", COLOR_DEPTH),
            text("HorizontalResolution", width),
            text("VerticalResolution", height),
        ],
    ));
    settings.push(pages(answers));
    settings.push(text("RegisteredOrganization", organization(answers)));
    let owner = if answers.as_reference { model(answers) } else { owner(answers) };
    settings.push(text("RegisteredOwner", owner));
    let logon = format!("cmd.exe /d /c call \"{SCRIPTS}\\SetupComplete.cmd\" logon");
    let (list, name) = ("FirstLogonCommands", "SynchronousCommand");
    settings.push(commands(list, name, "CommandLine", &[logon]));
    settings
}

fn accounts(answers: &Answers) -> Element {
    let administrator = password("AdministratorPassword", &answers.account);
    group("UserAccounts", vec![own_accounts(answers), administrator])
}

/// The list with the user's account: of this computer, or of the domain.
pub(super) fn own_accounts(answers: &Answers) -> Element {
    let account = &answers.account;
    match &answers.membership {
        Membership::Domain { name, .. } => {
            let settings = vec![text("Name", account.short_name()), text("Group", ADMINISTRATORS)];
            let list = vec![item("DomainAccount", settings), text("Domain", name)];
            group("DomainAccounts", vec![item("DomainAccountList", list)])
        }
        _ => {
            let settings = vec![
                text("Name", &account.user),
                text("Group", ADMINISTRATORS),
                password("Password", account),
            ];
            group("LocalAccounts", vec![item("LocalAccount", settings)])
        }
    }
}

pub(super) fn logon(answers: &Answers) -> Element {
    let account = &answers.account;
    let (user, domain) = match &answers.membership {
        Membership::Domain { name, .. } => (account.short_name(), Some(name)),
        _ => (account.user.as_str(), None),
    };
    let mut settings = vec![text("Username", user)];
    settings.extend(domain.map(|domain| text("Domain", domain)));
    settings.push(text("Enabled", true));
    settings.push(text("LogonCount", LOGONS));
    settings.push(password("Password", account));
    group("AutoLogon", settings)
}

/// The password in the form that is not readable at first sight: with the name of its element at
/// its end, as UTF-16, in base 64. That encrypts nothing.
pub(super) fn password(element: &str, account: &Account) -> Element {
    let text = format!("{}{element}", account.password.0);
    let bytes: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let value = secret("Value", STANDARD.encode(bytes));
    group(element, vec![value, super::text("PlainText", false)])
}

/// Hides the pages that ask the user. Without protection, Windows 8.1 and Server 2012 R2 do not
/// update; later versions only send less to Microsoft.
fn pages(answers: &Answers) -> Element {
    let updates_depend = matches!(answers.release, Release::Windows81 | Release::Server2012R2);
    let protection = if updates_depend && !answers.as_reference { 1 } else { 3 };
    let hidden = [
        "HideEULAPage",
        "HideLocalAccountScreen",
        "HideOEMRegistrationScreen",
        "HideOnlineAccountScreens",
        "HideWirelessSetupInOOBE",
    ];
    let mut settings: Vec<_> = hidden.iter().map(|name| text(name, true)).collect();
    settings.push(text("NetworkLocation", "Home"));
    settings.push(text("ProtectYourPC", protection));
    settings.push(text("SkipUserOOBE", true));
    settings.push(text("SkipMachineOOBE", true));
    group("OOBE", settings)
}

impl Account {
    /// The name of a domain account without the domain, which `user@domain` has.
    pub(super) fn short_name(&self) -> &str {
        self.user.split('@').next().unwrap_or_default()
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::value::Secret;

    #[test]
    fn passwords_are_encoded_as_windows_does() {
        let account =
            Account { user: "me".into(), password: Secret("admin".into()), autologin: true };
        let value = |element| password(element, &account).children()[0].text().unwrap().to_owned();
        assert_eq!(value("Password"), "YQBkAG0AaQBuAFAAYQBzAHMAdwBvAHIAZAA=");
        let administrator =
            "YQBkAG0AaQBuAEEAZABtAGkAbgBpAHMAdAByAGEAdABvAHIAUABhAHMAcwB3AG8AcgBkAA==";
        assert_eq!(value("AdministratorPassword"), administrator);
    }

    #[test]
    fn domain_accounts_may_name_their_domain() {
        let short = |user: &str| {
            let password = Secret(String::new());
            Account { user: user.into(), password, autologin: true }.short_name().to_owned()
        };
        assert_eq!((short("me").as_str(), short("me@lab").as_str()), ("me", "me"));
    }
}
