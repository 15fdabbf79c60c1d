//! The pages and lists of Microsoft's servers, in their form.

use crate::Site;
use crate::fault::Fault;

pub(crate) struct Page {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) body: Vec<u8>,
    pub(crate) location: Option<String>,
}

fn page(kind: &'static str, text: String) -> Page {
    Page { status: 200, kind, body: text.into_bytes(), location: None }
}

const CAPTCHA: &str = "<!DOCTYPE html><html><body>Are you a robot? Type the letters.</body></html>";
const SENTINEL: &str = "{\"Errors\":[{\"Key\":\"SentinelReject\",\"Value\":\"Sentinel \
    marked this request as rejected.\",\"Type\":9}]}";
const STATIC: &str = "https://software-static.download.prss.microsoft.com";
/// The server of upgrade images, and the links to the catalogs of them.
pub(crate) const UPGRADES: &str = "dl.delivery.mp.microsoft.com";
const CATALOGS: [&str; 2] = ["linkid=2156292", "linkid=841361"];
const LANGUAGES: [&str; 4] = ["English", "German", "Korean", "French"];

/// The page at an address, or `None` for a file.
pub(crate) fn find(site: &Site, host: &str, path: &str, query: &str) -> Option<Page> {
    let known = match (host, path) {
        ("vlscppe.microsoft.com", "/tags") => page("text/html", String::new()),
        ("ov-df.microsoft.com", "/mdt.js") => page("text/javascript", script(query)),
        ("ov-df.microsoft.com", "/") => page("text/html", "<html></html>".into()),
        ("www.microsoft.com", path) => www(site, path)?,
        ("go.microsoft.com", _) => Page {
            status: 302,
            location: Some(match CATALOGS.iter().any(|id| query.ends_with(id)) {
                true => "https://download.microsoft.com/download/products.cab".into(),
                false => format!("{STATIC}/dbazure/fake_x64{}.iso", culture_of_link(site, query)),
            }),
            ..page("text/html", String::new())
        },
        ("download.microsoft.com", "/download/products.cab") => {
            let body = cabinet(catalog(site).as_bytes());
            Page { body, ..page("application/octet-stream", String::new()) }
        }
        _ => return None,
    };
    if site.has(|fault| *fault == Fault::Captcha).is_some() {
        return Some(page("text/html", CAPTCHA.into()));
    }
    match site.has(|fault| matches!(fault, Fault::PageStatus(_))) {
        Some(Fault::PageStatus(status)) => {
            Some(Page { status, ..page("text/html", "<html>no</html>".into()) })
        }
        _ => Some(known),
    }
}

fn www(site: &Site, path: &str) -> Option<Page> {
    if path.contains("/evalcenter/") {
        return Some(page("text/html", evaluation(site)));
    }
    if path.ends_with("/getskuinformationbyproductedition") {
        let skus = LANGUAGES.iter().zip(19001..);
        let skus: Vec<_> = skus
            .map(|(language, id)| format!("{{\"Id\":\"{id}\",\"Language\":\"{language}\"}}"))
            .collect();
        return Some(page("text/plain", format!("{{\"Skus\":[{}]}}", skus.join(","))));
    }
    if path.ends_with("/GetProductDownloadLinksBySku") {
        if site.has(|fault| *fault == Fault::Sentinel).is_some() {
            return Some(page("text/plain", SENTINEL.into()));
        }
        let file = "https://software.download.prss.microsoft.com/dbazure/Win11_fake_x64.iso";
        return Some(page(
            "text/plain",
            format!(
                "{{\"ProductDownloadOptions\":[{{\"Uri\":\"{file}?t=1\",\"DownloadType\":1}}]}}"
            ),
        ));
    }
    if path.contains("/software-download/") {
        let (product, name) = match path.contains("windows10") {
            true => (2618, "Windows 10"),
            false => (3321, "Windows 11"),
        };
        let rows = LANGUAGES.iter().map(|language| {
            let digits = site.sha256().to_uppercase();
            format!("<tr><td>{language} 64-bit</td><td>{digits}</td></tr>")
        });
        let rows: String = match site.has(|fault| *fault == Fault::NoChecksum) {
            Some(_) => String::new(),
            None => rows.collect(),
        };
        return Some(page(
            "text/html",
            format!(
                "<!DOCTYPE html><html><select><option value=\"\">Select</option>\
             <option value=\"{product}\">{name} (multi-edition ISO)</option></select>\
             <table>{rows}</table></html>"
            ),
        ));
    }
    Some(Page { status: 404, ..page("text/html", "<html>no such page</html>".into()) })
}

fn script(query: &str) -> String {
    let session = query.split('&').find(|pair| pair.starts_with("session_id=")).unwrap_or_default();
    format!(
        "window.dfp={{url:\"https://ov-df.microsoft.com/?{session}&CustomerId=1&PageId=si\
         &w=8DF26E07265FC0D\"}};src+=\"&mdt=\"+start;src+=\"&rticks=\"+1791644954371;"
    )
}

fn culture(query: &str) -> String {
    let pair = query.split('&').find_map(|pair| pair.strip_prefix("culture="));
    pair.map_or_else(String::new, |culture| format!("_{culture}"))
}

const CULTURES: [(&str, &str); 3] = [("en-us", "us"), ("de-de", "de"), ("ko-kr", "kr")];

fn evaluation(site: &Site) -> String {
    let same = site.has(|fault| *fault == Fault::OneCulture).is_some();
    let links = CULTURES.iter().zip([0, 2, 4]).flat_map(|((culture, country), first)| {
        let (first, culture, country) =
            if same { (first, "en-us", "us") } else { (0, *culture, *country) };
        [1, 2].map(|number| {
            let number = first + number;
            format!(
                "<a href=\"https://go.microsoft.com/fwlink/p/?LinkID={number}&amp;clcid=0x409\
                 &amp;culture={culture}&amp;country={country}\">64-bit edition</a>"
            )
        })
    });
    format!("<!DOCTYPE html><html>{}</html>", links.collect::<String>())
}

/// The culture to which a link of the page above leads.
fn culture_of_link(site: &Site, query: &str) -> String {
    let number = query.split('&').find_map(|pair| pair.strip_prefix("LinkID=")?.parse().ok());
    match number {
        Some(number @ 1..=6_usize) if site.has(|fault| *fault == Fault::OneCulture).is_some() => {
            format!("_{}", CULTURES[(number - 1) / 2].0)
        }
        _ => culture(query),
    }
}

/// The catalog of upgrade images. There is one for each language but Korean.
fn catalog(site: &Site) -> String {
    let Some(upgrade) = &site.upgrade else { return "<MCT></MCT>".into() };
    let (length, sha1) = (upgrade.length, &upgrade.sha1);
    let files = ["en-us", "de-de", "fr-fr"].map(|culture| {
        format!(
            "<File id=\"1\"><FileName>x.esd</FileName><LanguageCode>{culture}</LanguageCode>\
             <Edition>Professional</Edition><Architecture>x64</Architecture><Size>{length}</Size>\
             <Sha1>{sha1}</Sha1><FilePath>http://{UPGRADES}/files/x_{culture}.esd</FilePath></File>"
        )
    });
    format!("<MCT><Catalogs><Files>{}</Files></Catalogs></MCT>", files.concat())
}

/// A cabinet with the catalog as its only file (MS-CAB), not compressed.
fn cabinet(catalog: &[u8]) -> Vec<u8> {
    let u32 = |number: usize| u32::try_from(number).expect("a short catalog").to_le_bytes();
    let length = u16::try_from(catalog.len()).expect("a short catalog").to_le_bytes();
    let name = b"products.xml\0";
    let data = 36 + 8 + 16 + name.len();
    let whole = data + 8 + catalog.len();
    let header = [b"MSCF\0\0\0\0", &u32(whole)[..], &[0; 4], &u32(36 + 8), &[0; 4], &[3, 1]];
    let counts = [&[1, 0, 1, 0, 0, 0, 0, 0, 0, 0][..], &u32(data), &[1, 0, 0, 0]];
    let file = [&u32(catalog.len())[..], &[0; 12], name];
    let block = [&[0; 4][..], &length, &length, catalog];
    [header.concat(), counts.concat(), file.concat(), block.concat()].concat()
}
