//! Settings in the places where Setup accepts them, and elsewhere.

use super::*;

/// A document with these settings in a component.
fn document(pass: &str, name: &str, settings: &str) -> String {
    format!(
        "<u:unattend xmlns:u=\"{UNATTEND}\"><u:settings xmlns:u=\"{UNATTEND}\" pass=\"{pass}\">\
         <u:component xmlns:u=\"{UNATTEND}\" name=\"{name}\" language=\"neutral\" \
         processorArchitecture=\"amd64\" publicKeyToken=\"31bf3856ad364e35\" \
         versionScope=\"nonSxS\">{settings}</u:component></u:settings></u:unattend>"
    )
}

/// The settings with the namespace that canonical text writes at each tag.
fn spaced(settings: &str) -> String {
    let add = format!(" xmlns:u=\"{UNATTEND}\"");
    let list = format!("{add} w:action=\"add\" xmlns:w=\"{WCM}\"");
    let text = settings.replace("</", "\0").replace('<', "<u:").replace('\0', "</u:");
    text.replace('-', &add).replace('+', &list)
}

fn checked(pass: &str, name: &str, settings: &str) -> Result<(), String> {
    let root = super::super::xml::parse(&document(pass, name, &spaced(settings))).unwrap();
    check(&root).map_err(|error| format!("{error:#}"))
}

/// The answer files that the pod makes for twelve environments.
#[test]
fn golden_answer_files_are_accepted() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../container/src/answer/golden");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let root = super::super::xml::read(&path).unwrap();
        check(&root).unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
        // Each part of it matters: without its namespaces and its marks it is none.
        let text = std::fs::read_to_string(&path).unwrap();
        for (from, to) in [
            (" wcm:action=\"add\"", ""),
            (UNATTEND, "urn:other"),
            ("<Order>1</Order>", "<Order>2</Order>"),
        ] {
            let root = super::super::xml::parse(&text.replace(from, to)).unwrap();
            assert!(check(&root).is_err(), "{}: without {from}", path.display());
        }
        count += 1;
    }
    assert_eq!(count, 12);
}

const SETUP: &str = "Microsoft-Windows-Setup";
const DEPLOYMENT: &str = "Microsoft-Windows-Deployment";

#[test]
fn settings_are_known_typed_and_in_order() {
    let ok = |settings| checked("windowsPE", SETUP, settings);
    let good = "<UseConfigurationSet->true</UseConfigurationSet>\
                <UserData-><AcceptEula->true</AcceptEula></UserData>";
    assert_eq!(ok(good), Ok(()));
    for (bad, why) in [
        ("<UserData-><AcceptEula->yes</AcceptEula></UserData>", "no boolean"),
        ("<UserData-></UserData><UseConfigurationSet->true</UseConfigurationSet>", "too late"),
        ("<UserData-></UserData><UserData-></UserData>", "twice"),
        ("<UseConfigurationSet+>true</UseConfigurationSet>", "attributes"),
        ("<Lunch->true</Lunch>", "no setting Lunch"),
        ("<UserData->words</UserData>", "text"),
        ("<UserData-><FullName-></FullName></UserData>", "0 characters"),
    ] {
        let error = ok(bad).unwrap_err();
        assert!(error.contains(why) && error.contains("pass [windowsPE]"), "{bad}: {error}");
    }
}

#[test]
fn items_of_lists_are_marked_and_numbered() {
    let command = |mark: &str, number: &str| {
        let name = "RunSynchronousCommand";
        format!("<{name}{mark}><Order->{number}</Order><Path->cmd.exe</Path></{name}>")
    };
    let list = |items: &[String]| {
        let settings = format!("<RunSynchronous->{}</RunSynchronous>", items.concat());
        checked("specialize", DEPLOYMENT, &settings)
    };
    assert_eq!(list(&[command("+", "1"), command("+", "2")]), Ok(()));
    assert!(list(&[command("+", "1"), command("+", "1")]).unwrap_err().contains("comes twice"));
    assert!(list(&[command("-", "1")]).unwrap_err().contains("wcm:action"));
    assert!(list(&[command("+", "501")]).unwrap_err().contains("not in 1..500"));
    assert!(list(&[command("+", "x")]).unwrap_err().contains("no number"));
}

#[test]
fn components_are_in_their_passes() {
    assert!(checked("oobeSystem", SETUP, "").unwrap_err().contains("not for this pass"));
    assert!(checked("lunch", SETUP, "").unwrap_err().contains("no such pass"));
    assert!(checked("specialize", "Lunch", "").unwrap_err().contains("no such component"));
}
