//! Membership of a domain or a workgroup (Microsoft: Microsoft-Windows-UnattendedJoin). There is no
//! domain to ask, so that the only account it knows is the one that joins.

use anyhow::{Context as _, bail, ensure};

use super::console::say;
use super::registry::Registry;
use super::xml::Element;

const NETWORK: &str = "HKLM\\SYSTEM\\CurrentControlSet\\Services\\Tcpip\\Parameters";
/// The account that joined. Its password is one of a test.
const JOINED: &str = "HKLM\\SECURITY\\Joined";

/// Obeys `Identification`.
pub(crate) fn join(component: &Element, registry: &mut Registry) -> anyhow::Result<()> {
    let identification = component.at("Identification").context("no Identification")?;
    let domain = identification.value("JoinDomain");
    match (domain, identification.value("JoinWorkgroup")) {
        (Some(domain), None) => join_domain(identification, domain, registry),
        (None, Some(group)) => {
            ensure!(identification.at("Credentials").is_none(), "a workgroup takes no credentials");
            registry.set(NETWORK, "Workgroup", group);
            say!("joined the workgroup {group}");
            Ok(())
        }
        other => bail!("one of JoinDomain and JoinWorkgroup: {other:?}"),
    }
}

fn join_domain(
    identification: &Element,
    domain: &str,
    registry: &mut Registry,
) -> anyhow::Result<()> {
    let credentials = identification.at("Credentials").context("no account that may join")?;
    let user = credentials.value("Username").context("no Username")?;
    let password = credentials.value("Password").context("no Password")?;
    // `user@domain` names the domain of the account itself.
    let (name, of) = match (user.split_once('@'), credentials.value("Domain")) {
        (Some((name, of)), None) => (name, of),
        (None, Some(of)) => (user, of),
        _ => bail!("{user}: the account's domain is to be named once"),
    };
    ensure!(of.eq_ignore_ascii_case(domain), "{user}: an account of another domain");
    let unit = identification.value("MachineObjectOU");
    let is_pair = |part: &str| part.split_once('=').is_some_and(|(key, _)| key.len() == 2);
    if let Some(unit) = unit {
        ensure!(unit.split(',').all(is_pair), "{unit}: no distinguished name");
    }
    for (key, value) in [("User", name), ("Password", password)] {
        registry.set(JOINED, key, value);
    }
    registry.set(NETWORK, "Domain", domain);
    say!("joined the domain {domain} as {user} in {}", unit.unwrap_or("its default unit"));
    Ok(())
}

/// The accounts of the domain in `UserAccounts`, with their passwords.
pub(crate) fn accounts(
    shell_setup: &Element,
    registry: &Registry,
) -> anyhow::Result<Vec<(String, String)>> {
    let mut users = Vec::new();
    let lists = shell_setup.at("UserAccounts/DomainAccounts");
    for list in lists.into_iter().flat_map(|lists| &lists.children) {
        let domain = list.value("Domain").context("domain accounts without their domain")?;
        let joined = registry.get(NETWORK, "Domain");
        ensure!(joined == Some(domain), "{domain}: this computer is not in the domain");
        for account in list.children.iter().filter(|it| it.name == "DomainAccount") {
            let name = account.value("Name").context("an account without a name")?;
            let group = account.value("Group").context("an account without a group")?;
            let is_known = registry.get(JOINED, "User") == Some(name);
            ensure!(is_known, "{name}: the domain has no such account");
            let password = registry.get(JOINED, "Password").unwrap_or_default();
            users.push((format!("{domain}\\{name}"), password.to_owned()));
            say!("account {name} of {domain} in {group}");
        }
    }
    Ok(users)
}

#[cfg(test)]
mod test {
    use super::super::xml::parse;
    use super::*;

    const CREDENTIALS: &str = "<Credentials><Username>me@lab</Username><Password>x</Password>\
                               </Credentials><JoinDomain>lab</JoinDomain>";

    fn joined(settings: &str, registry: &mut Registry) -> Result<(), String> {
        let text = format!("<c><Identification>{settings}</Identification></c>");
        join(&parse(&text).unwrap(), registry).map_err(|error| error.to_string())
    }

    #[test]
    fn a_computer_joins_with_an_account_of_the_domain() {
        let mut registry = Registry::default();
        let unit = format!("{CREDENTIALS}<MachineObjectOU>OU=a,DC=lab</MachineObjectOU>");
        let other = CREDENTIALS.replace("me@lab<", "me<").replace("<U", "<Domain>lab</Domain><U");
        for good in [CREDENTIALS, &unit, &other, "<JoinWorkgroup>OFFICE</JoinWorkgroup>"] {
            assert_eq!(joined(good, &mut registry), Ok(()), "{good}");
        }
        for (bad, why) in [
            (CREDENTIALS.replace("me@lab", "me"), "named once"),
            (CREDENTIALS.replace("me@lab", "me@other"), "another domain"),
            (unit.replace("OU=a", "a"), "distinguished name"),
            ("<JoinDomain>lab</JoinDomain>".into(), "no account"),
            (format!("{CREDENTIALS}<JoinWorkgroup>x</JoinWorkgroup>"), "one of"),
            (String::new(), "one of"),
        ] {
            let error = joined(&bad, &mut Registry::default()).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn accounts_are_those_of_the_joined_domain() {
        let list = |domain: &str, name: &str| {
            let account =
                format!("<DomainAccount><Name>{name}</Name><Group>g</Group></DomainAccount>");
            let list = format!("<L>{account}<Domain>{domain}</Domain></L>");
            let text = format!("<DomainAccounts>{list}</DomainAccounts>");
            parse(&format!("<s><UserAccounts>{text}</UserAccounts></s>")).unwrap()
        };
        let mut registry = Registry::default();
        assert!(accounts(&list("lab", "me"), &registry).is_err());
        joined(CREDENTIALS, &mut registry).unwrap();
        let found = accounts(&list("lab", "me"), &registry).unwrap();
        assert_eq!(found, [("lab\\me".to_owned(), "x".to_owned())]);
        assert!(accounts(&list("lab", "you"), &registry).is_err());
        assert!(accounts(&list("other", "me"), &registry).is_err());
    }
}
