//! The pages and lists of Microsoft's servers, in their form.

use crate::Site;
use crate::fault::Fault;

pub(crate) struct Page {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    pub(crate) location: Option<String>,
}

fn page(kind: &'static str, text: String) -> Page {
    Page { status: 200, kind, text, location: None }
}

const CAPTCHA: &str = "<!DOCTYPE html><html><body>Are you a robot? Type the letters.</body></html>";
const SENTINEL: &str = "{\"Errors\":[{\"Key\":\"SentinelReject\",\"Value\":\"Sentinel \
    marked this request as rejected.\",\"Type\":9}]}";
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
            location: Some(format!(
                "https://software-static.download.prss.microsoft.com/dbazure/fake_x64{}.iso",
                culture(query)
            )),
            ..page("text/html", String::new())
        },
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
        return Some(page("text/html", evaluation()));
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
             <option value=\"3321\">Windows 11 (multi-edition ISO)</option></select>\
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

fn evaluation() -> String {
    let cultures = [("en-us", "us"), ("de-de", "de"), ("ko-kr", "kr")];
    let links = cultures.iter().flat_map(|(culture, country)| {
        [1, 2].map(|number| {
            format!(
                "<a href=\"https://go.microsoft.com/fwlink/p/?LinkID={number}&amp;clcid=0x409\
                 &amp;culture={culture}&amp;country={country}\">64-bit edition</a>"
            )
        })
    });
    format!("<!DOCTYPE html><html>{}</html>", links.collect::<String>())
}
